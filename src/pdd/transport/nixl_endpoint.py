"""The one NIXL agent of a process: registered memory, and writes into that of others.

All of NIXL is used here and nowhere else. It is optional: the extra ``nixl`` brings it.
"""

import importlib
import mmap
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdd.core.errors import ConfigurationError, ConnectionLostError, DeadlineError

BLOCK_BYTES: Final = 2**20
"""Blocks of 64 KiB halve what UCX reaches."""
NUM_BLOCKS: Final = 4
"""Of one ring: what the writer may be ahead of the reader."""
_QUARANTINE_S: Final = 30.0
"""A ring is not used again for so long after its stream: a write of the old peer may still be on its way."""
_SPIN_S: Final = 0.0002
_NAP_S: Final = 0.0001
_MODULES: Final = ("nixl_cu12", "nixl_cu13")


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """Registered memory of ``NUM_BLOCKS`` blocks."""

    blocks: NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Of its first byte."""
        return int(self.blocks.ctypes.data)


class NixlEndpoint:
    """A NIXL agent with UCX and NIXL's own progress thread; all methods may be called from any thread.

    Raises:
        ConfigurationError: If NIXL is not installed, or UCX does not start.
    """

    def __init__(self) -> None:
        nixl = _load()
        self.name = f"pdd-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._free: list[Ring] = []
        self._quarantined: deque[tuple[float, Ring]] = deque()
        self._known: dict[str, bytes] = {}
        try:
            self._agent = nixl.nixl_agent(
                self.name, nixl.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
            )
        except Exception as error:  # NIXL's errors have no common base
            raise ConfigurationError(f"NIXL does not start: {error}") from error

    def take_ring(self) -> Ring:
        """A ring that is nobody's."""
        with self._lock:
            now_s = time.monotonic()
            while self._quarantined and self._quarantined[0][0] <= now_s:
                self._free.append(self._quarantined.popleft()[1])
            if self._free:
                return self._free.pop()
            memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES)
            ring = Ring(np.frombuffer(memory, dtype=np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES))
            self._agent.register_memory([(ring.address, NUM_BLOCKS * BLOCK_BYTES, 0, "")], "DRAM")
            return ring

    def give_ring_back(self, ring: Ring) -> None:
        """The ring is for others, in a while."""
        with self._lock:
            self._quarantined.append((time.monotonic() + _QUARANTINE_S, ring))

    def metadata(self) -> bytes:
        """What others need to write into all rings there are now."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def meet(self, name: str, metadata: bytes) -> None:
        """The named endpoint's rings can be written.

        Raises:
            ConnectionLostError: If NIXL does not take what it says of itself.
        """
        with self._lock:
            if name == self.name or self._known.get(name) == metadata:
                return
            try:
                self._agent.add_remote_agent(metadata)
            except Exception as error:  # NIXL's errors have no common base
                raise ConnectionLostError(f"NIXL does not take {name}: {error}") from error
            self._known[name] = metadata

    def write(self, name: str, source: int, target: int, num_bytes: int, *, deadline_s: float | None) -> None:
        """The bytes are in the other endpoint's memory.

        Args:
            name: Of the other endpoint.
            source: Address in a ring of ours.
            target: Address in a ring of theirs.
            num_bytes: How many.
            deadline_s: When to give up, on the monotonic clock.

        Raises:
            DeadlineError: If it took too long.
            ConnectionLostError: If NIXL says that it failed.
        """
        try:
            with self._lock:
                agent = self._agent
                near = agent.get_xfer_descs([(source, num_bytes, 0)], "DRAM")
                far = agent.get_xfer_descs([(target, num_bytes, 0)], "DRAM")
                handle = agent.initialize_xfer("WRITE", near, far, name)
                state = agent.transfer(handle)
            start_s = time.monotonic()
            while state == "PROC":
                now_s = time.monotonic()
                if deadline_s is not None and now_s > deadline_s:
                    raise DeadlineError(f"NIXL did not write to {name} in time")
                time.sleep(0 if now_s - start_s < _SPIN_S else _NAP_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
            with self._lock:
                agent.release_xfer_handle(handle)
        except DeadlineError:
            raise
        except Exception as error:  # NIXL's errors have no common base
            raise ConnectionLostError(f"NIXL cannot write to {name}: {error}") from error
        if state != "DONE":
            raise ConnectionLostError(f"NIXL cannot write to {name}: {state}")


def missing() -> str | None:
    """Why there is no NIXL here; None if there is."""
    try:
        _load()
    except ConfigurationError as error:
        return str(error)
    return None


def _load() -> Any:
    for name in _MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigurationError(f"{name} is installed, but cannot be loaded: {error}") from error
    raise ConfigurationError(f"NIXL is not installed: none of {', '.join(_MODULES)} (extra 'nixl')")
