"""The engine's side of the local protocol, without an engine: a primary tier in a memfd and the messages."""

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdd.core.fingerprint import FIELDS
from pdd.wire import local

WAIT_S = 120.0
"""Includes the start of an agent's process on a busy machine."""


def fingerprint(*, chunk_bytes: int, chunk_tokens: int, **changes: str) -> dict[str, str]:
    """A fingerprint with every field; equal for equal arguments."""
    values = dict.fromkeys(FIELDS, "test")
    values |= {"chunk_bytes": str(chunk_bytes), "chunk_tokens": str(chunk_tokens)}
    return values | changes


def key_of(name: int | str) -> bytes:
    """A key as vLLM makes them: 32 bytes of hash and 4 of group."""
    return str(name).encode().rjust(32, b"k") + bytes(4)


def chunk_of(key: bytes, chunk_bytes: int) -> np.ndarray:
    """Bytes that belong to this key and no other."""
    seed = int.from_bytes(key[-16:], "little")
    return np.random.default_rng(seed).integers(0, 256, chunk_bytes, dtype=np.uint8)


class FakeEngine:
    """Speaks for an engine; ``mirror`` is what its tier would answer lookups from."""

    def __init__(
        self,
        path: Path,
        engine_id: str,
        *,
        chunk_bytes: int = 4096,
        chunk_tokens: int = 32,
        num_slots: int = 64,
        row_padding: int = 64,
        version: int = local.LOCAL_VERSION,
        claimed_slots: int | None = None,
        sampler: str = "",
        **changes: str,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.chunk_tokens = chunk_tokens
        self.num_slots = num_slots
        self._row_bytes = chunk_bytes + row_padding
        self._fd = os.memfd_create("primary")
        os.ftruncate(self._fd, self._row_bytes * num_slots)
        self._memory = mmap.mmap(self._fd, self._row_bytes * num_slots)
        self._rows = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_slots, -1)
        self.mirror: set[bytes] = set()
        self.welcome: local.Welcome | None = None
        self.refused: str | None = None
        self.is_closed = False
        self._stored: set[int] = set()
        self._loaded: dict[int, list[bytes]] = {}
        self._job = 0
        self._changed = threading.Condition()
        self._paused = threading.Event()
        self._paused.set()
        self._socket = self._connect(path)
        hello = local.Hello(
            version=version,
            engine_id=engine_id,
            fingerprint=fingerprint(chunk_bytes=chunk_bytes, chunk_tokens=chunk_tokens, **changes),
            chunk_bytes=chunk_bytes,
            chunk_tokens=chunk_tokens,
            primary_row_bytes=self._row_bytes,
            num_primary_slots=claimed_slots or num_slots,
            sampler=sampler,
        )
        socket.send_fds(self._socket, [local.encode(hello)], [self._fd])
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.wait(lambda: self.welcome is not None or self.refused is not None or self.is_closed)

    def begin(
        self, request: str, transfer: str, targets: Sequence[str], prompt_tokens: int, **urgency: Any
    ) -> None:
        self._send(
            local.BeginTransfer(
                request=request,
                transfer=transfer,
                targets=list(targets),
                prompt_tokens=prompt_tokens,
                **urgency,
            )
        )

    def store(self, request: str, names: Sequence[int | str], *, first: int = 0, wait: bool = True) -> int:
        """Chunks ``first``... of the request are stored, in as many jobs as the primary tier needs."""
        for start in range(0, len(names), self.num_slots):
            keys = [key_of(name) for name in names[start : start + self.num_slots]]
            for slot, key in enumerate(keys):
                self._rows[slot, : self.chunk_bytes] = chunk_of(key, self.chunk_bytes)
            ends = [(first + start + i + 1) * self.chunk_tokens for i in range(len(keys))]
            job = self.store_slots(request, keys, list(range(len(keys))), ends)
            if wait or start + self.num_slots < len(names):
                self.wait_stored(job)
        return self._job

    def store_slots(self, request: str, keys: list[bytes], slots: list[int], end_tokens: list[int]) -> int:
        self._job += 1
        self._send(
            local.StoreChunks(job=self._job, request=request, keys=keys, slots=slots, end_tokens=end_tokens)
        )
        return self._job

    def wait_stored(self, job: int) -> None:
        self.wait(lambda: job in self._stored or self.is_closed)

    def finish(self, request: str) -> None:
        self._send(local.FinishRequest(request=request))

    def push(
        self,
        transfer: str,
        targets: Sequence[str],
        names: Sequence[int | str],
        *,
        extra_tokens: int = 0,
        **urgency: Any,
    ) -> None:
        """A whole prefill whose chunks go to the targets."""
        request = f"req-{transfer}"
        self.begin(request, transfer, targets, len(names) * self.chunk_tokens + extra_tokens, **urgency)
        self.store(request, names)
        self.finish(request)

    def load(self, names: Sequence[int | str]) -> dict[bytes, np.ndarray]:
        """What the agent copied into the primary tier for these chunks; only those it had."""
        result: dict[bytes, np.ndarray] = {}
        for start in range(0, len(names), self.num_slots):
            keys = [key_of(name) for name in names[start : start + self.num_slots]]
            self._job += 1
            job = self._job
            slots = list(range(len(keys)))
            self._send(local.LoadChunks(job=job, keys=keys, slots=slots))
            self.wait(lambda job=job: job in self._loaded)
            for slot, key in enumerate(keys):
                if key in self._loaded[job]:
                    result[key] = self._rows[slot, : self.chunk_bytes].copy()
        return result

    def check_load(self, names: Sequence[int | str]) -> None:
        """Every chunk is in the store, byte for byte."""
        loaded = self.load(names)
        for name in names:
            key = key_of(name)
            assert key in loaded, f"chunk {name} is not in the store"
            assert np.array_equal(loaded[key], chunk_of(key, self.chunk_bytes)), f"chunk {name} differs"

    def has(self, names: Sequence[int | str]) -> bool:
        return all(key_of(name) in self.mirror for name in names)

    def wait(self, is_true: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_true, WAIT_S), "the agent did not answer"

    def pause_reading(self) -> None:
        self._paused.clear()

    def resume_reading(self) -> None:
        self._paused.set()

    def close(self) -> None:
        """As if the engine's process had died."""
        self._paused.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._socket.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _connect(self, path: Path) -> socket.socket:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(path))
                return sock
            except OSError:
                sock.close()
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)

    def _send(self, message: local.Message) -> None:
        self._socket.sendall(local.encode(message))

    def _read(self) -> None:
        decoder = local.AgentDecoder()
        try:
            while True:
                self._paused.wait()
                data = self._socket.recv(65536)
                if not data:
                    break
                for message in decoder.feed(data):
                    self._on_message(message)
        except OSError:
            pass
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _on_message(self, message: local.FromAgent) -> None:
        with self._changed:
            match message:
                case local.Welcome():
                    self.welcome = message
                    self.mirror = set(message.keys)
                case local.Refused(reason=reason):
                    self.refused = reason
                case local.KeysChanged(added=added, removed=removed):
                    self.mirror |= set(added)
                    self.mirror -= set(removed)
                case local.StoreDone(job=job):
                    self._stored.add(job)
                case local.LoadDone(job=job, loaded=loaded):
                    self._loaded[job] = loaded
            self._changed.notify_all()
