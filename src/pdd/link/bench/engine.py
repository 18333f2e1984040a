"""The engine's side of an agent's socket, without an engine: chunks of noise in a memory of its own."""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pdd.core.errors import ConnectError, DeadlineError
from pdd.core.fingerprint import FIELDS
from pdd.wire import local

WAIT_S: Final = 60.0
CHUNK_TOKENS: Final = 32
NUM_SLOTS: Final = 64


class BenchEngine:
    """Stores chunks with the agent and orders their transfer, as a prefill engine's tier does.

    Args:
        path: The agent's Unix socket; waited for.
        engine_id: Whose tier this is.
        chunk_bytes: Size of every chunk.

    Raises:
        ConnectError: If the agent does not listen, or refuses.
    """

    def __init__(self, path: Path, engine_id: str, *, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._is_welcome = False
        self._job = 0
        self._fd = os.memfd_create("pdd-bench-primary")
        os.ftruncate(self._fd, chunk_bytes * NUM_SLOTS)
        with mmap.mmap(self._fd, chunk_bytes * NUM_SLOTS) as memory:
            for slot in range(NUM_SLOTS):
                memory[slot * chunk_bytes : (slot + 1) * chunk_bytes] = os.urandom(chunk_bytes)
        self._socket = _connect(path)
        hello = local.Hello(
            version=local.LOCAL_VERSION,
            engine_id=engine_id,
            fingerprint=dict.fromkeys(FIELDS, "bench") | {"chunk_bytes": str(chunk_bytes)},
            chunk_bytes=chunk_bytes,
            chunk_tokens=CHUNK_TOKENS,
            primary_row_bytes=chunk_bytes,
            num_primary_slots=NUM_SLOTS,
        )
        socket.send_fds(self._socket, [local.encode(hello)], [self._fd])
        self._thread = threading.Thread(target=self._read, name="pdd-bench-engine", daemon=True)
        self._thread.start()
        self._wait(lambda: self._is_welcome)

    def prepare(self, name: str, num_chunks: int) -> list[bytes]:
        """New chunks are in the agent's store; returns their keys."""
        keys = [f"{name}-{index}".encode().rjust(32, b"b") + bytes(4) for index in range(num_chunks)]
        for start in range(0, num_chunks, NUM_SLOTS):
            part = keys[start : start + NUM_SLOTS]
            self._store("prepare", part, first=start)
            job = self._job
            self._wait(lambda job=job: job in self._done)  # type: ignore[misc]  # a bound default
        return keys

    def order(self, transfer: str, target: str, keys: Sequence[bytes]) -> None:
        """The transfer of chunks that are in the store is ordered, all at once."""
        self._send(
            local.BeginTransfer(
                request=transfer,
                transfer=transfer,
                targets=[target],
                prompt_tokens=len(keys) * CHUNK_TOKENS,
            )
        )
        for start in range(0, len(keys), NUM_SLOTS):
            self._store(transfer, keys[start : start + NUM_SLOTS], first=start)
        self._send(local.FinishRequest(request=transfer))

    def close(self) -> None:
        """The agent has lost its engine."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._socket.close()
        os.close(self._fd)

    def _store(self, request: str, keys: Sequence[bytes], *, first: int) -> None:
        self._job += 1
        ends = [(first + index + 1) * CHUNK_TOKENS for index in range(len(keys))]
        slots = list(range(len(keys)))
        self._send(
            local.StoreChunks(job=self._job, request=request, keys=list(keys), slots=slots, end_tokens=ends)
        )

    def _send(self, message: local.Message) -> None:
        self._socket.sendall(local.encode(message))

    def _wait(self, is_true: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(is_true, WAIT_S):
                raise DeadlineError(f"the agent did not answer its engine in {WAIT_S:g} s")

    def _read(self) -> None:
        decoder = local.AgentDecoder()
        while data := self._socket.recv(65536):
            with self._changed:
                for message in decoder.feed(data):
                    self._is_welcome |= isinstance(message, local.Welcome)
                    if isinstance(message, local.StoreDone):
                        self._done.add(message.job)
                self._changed.notify_all()


def _connect(path: Path) -> socket.socket:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            if time.monotonic() > deadline_s:
                raise ConnectError(f"no agent listens at {path}") from error
            time.sleep(0.02)
        else:
            return sock
