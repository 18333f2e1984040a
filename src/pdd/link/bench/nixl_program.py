"""One end of a NIXL transfer over TCP: ``python -m pdd.link.bench.nixl_program target|initiator NUM_BYTES``.

Talks JSON, a line each way. Both ends poll from their own thread, as NIXL wants; the target by taking
notifications, else TCP writes stand still.
"""

import base64
import importlib
import json
import os
import sys
import time
from typing import Any, Final

import numpy as np

BLOCK_BYTES: Final = 2**20
_POLL_S: Final = 0.00005


def nixl_module() -> Any:
    """NIXL's Python module, whatever CUDA its wheel was built for; it needs none.

    Raises:
        ImportError: If none is installed.
    """
    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
    raise ImportError("neither nixl-cu12 nor nixl-cu13 is installed")


class End:
    """One agent with one registered buffer."""

    def __init__(self, name: str, num_bytes: int) -> None:
        nixl = nixl_module()
        self.agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        self.buffer = np.zeros(num_bytes, dtype=np.uint8)
        self.buffer[:] = 1  # touched, so that no page is made while the clock runs
        self.agent.register_memory([(self.buffer.ctypes.data, num_bytes, 0, "")], "DRAM")

    def describe(self) -> dict[str, Any]:
        """What the other end has to know."""
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"name": self.agent.name, "metadata": metadata, "address": self.buffer.ctypes.data}


def _blocks(address: int, num_bytes: int) -> list[tuple[int, int, int]]:
    starts = range(0, num_bytes, BLOCK_BYTES)
    return [(address + start, min(BLOCK_BYTES, num_bytes - start), 0) for start in starts]


def _serve(end: End) -> None:
    """Polls until its input ends."""
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        end.agent.get_new_notifs()
        try:
            if not os.read(sys.stdin.fileno(), 4096):
                return
        except BlockingIOError:
            time.sleep(_POLL_S)


def _send(end: End, target: dict[str, Any], num_bytes: int) -> float:
    """Seconds until all bytes are in the target's memory."""
    agent = end.agent
    near = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _blocks(end.buffer.ctypes.data, num_bytes), "DRAM")
    far = agent.prep_xfer_dlist(target["name"], _blocks(target["address"], num_bytes), "DRAM")
    indices = list(range(-(-num_bytes // BLOCK_BYTES)))
    handle = agent.make_prepped_xfer("WRITE", near, indices, far, indices, b"done")
    start_s = time.monotonic()
    state = agent.transfer(handle)
    while state == "PROC":
        time.sleep(_POLL_S)
        state = agent.check_xfer_state(handle)
    elapsed_s = time.monotonic() - start_s
    if state != "DONE":
        raise RuntimeError(f"NIXL says {state}")
    agent.release_xfer_handle(handle)
    return elapsed_s


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(role: str, num_bytes: int) -> None:
    """The end has served until its input ended."""
    end = End(role, num_bytes)
    _answer(end.describe())
    if role == "target":
        _serve(end)
        return
    target: dict[str, Any] = json.loads(sys.stdin.readline())
    end.agent.add_remote_agent(base64.b64decode(target["metadata"]))
    for line in sys.stdin:
        _answer({"elapsed_s": _send(end, target, int(line))})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
