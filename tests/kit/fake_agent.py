"""An agent in one thread: the store is a dict, peers do not exist, and every message is remembered.

Speaks ``pdd.wire.local`` over a real Unix socket and copies through a mapping of the engine's primary tier,
so that an engine cannot tell it from the real one. Run as ``python -m tests.kit.fake_agent SOCKET`` it is a
process of its own that tests can kill.
"""

import contextlib
import mmap
import os
import select
import socket
import sys
import threading
from pathlib import Path
from typing import TypeVar

from pdd.wire.local import (
    LOCAL_VERSION,
    EngineDecoder,
    FromEngine,
    Hello,
    KeysChanged,
    LoadChunks,
    LoadDone,
    Message,
    Refused,
    StoreChunks,
    StoreDone,
    Welcome,
    encode,
)

M = TypeVar("M", bound=Message)


class FakeAgent:
    """Serves one engine after the other on a Unix socket."""

    def __init__(self, path: Path, *, refuse: str | None = None, answer_jobs: bool = True) -> None:
        """The socket listens; ``start`` serves it.

        Args:
            path: Where to listen; an old socket there is removed.
            refuse: If set, every engine is refused with this reason.
            answer_jobs: Whether store and load jobs are carried out at once, or left to the test.
        """
        self.path = path
        self.refuse = refuse
        self.answer_jobs = answer_jobs
        self.chunks: dict[bytes, bytes] = {}
        self.received: list[FromEngine] = []
        self.hello: Hello | None = None
        self._memory: mmap.mmap | None = None
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._stopping = False
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(4)
        self._thread = threading.Thread(target=self.serve, daemon=True)

    def start(self) -> "FakeAgent":
        """Serves in a thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """The connection and the listener are closed, and the thread has ended."""
        self._stopping = True
        self.drop_connection()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        if self._memory is not None:
            self._memory.close()

    def drop_connection(self) -> None:
        """The engine sees the agent's end of the socket closed."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def send(self, message: Message) -> None:
        """The message is on its way to the engine."""
        assert self._connection is not None
        self._connection.sendall(encode(message))

    def wait_for(self, kind: type[M], *, count: int = 1, timeout_s: float = 60.0) -> list[M]:
        """At least ``count`` messages of a kind, as soon as they are there."""
        with self._news:
            ok = self._news.wait_for(lambda: len(self._of(kind)) >= count, timeout=timeout_s)
            assert ok, f"{len(self._of(kind))} of {count} {kind.__name__} came: {self.received}"
            return self._of(kind)

    def _of(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    def serve(self) -> None:
        """Serves until ``stop``."""
        while not self._stopping:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._connection = connection
                with contextlib.suppress(OSError):
                    self._serve_one(connection)
                self._connection = None

    def _serve_one(self, connection: socket.socket) -> None:
        decoder = EngineDecoder()
        data, descriptors, _, _ = socket.recv_fds(connection, 65536, 1)
        while data:
            for message in decoder.feed(data):
                self._handle(message, descriptors)
            data = connection.recv(65536)

    def _handle(self, message: FromEngine, descriptors: list[int]) -> None:
        with self._news:
            self.received.append(message)
            self._news.notify_all()
        if isinstance(message, Hello):
            self._welcome(message, descriptors)
        elif isinstance(message, StoreChunks) and self.answer_jobs:
            self.carry_out_store(message)
        elif isinstance(message, LoadChunks) and self.answer_jobs:
            self.carry_out_load(message)

    def _welcome(self, hello: Hello, descriptors: list[int]) -> None:
        if self.refuse is not None:
            self.send(Refused(reason=self.refuse))
            raise OSError("refused")
        self.hello = hello
        self._memory = mmap.mmap(descriptors[0], hello.primary_row_bytes * hello.num_primary_slots)
        os.close(descriptors[0])
        self.send(Welcome(version=LOCAL_VERSION, keys=list(self.chunks)))

    def carry_out_store(self, job: StoreChunks) -> None:
        """The job's chunks are in the store, and the engine knows."""
        assert self.hello is not None
        assert self._memory is not None
        added = [key for key in job.keys if key not in self.chunks]
        for key, slot in zip(job.keys, job.slots, strict=True):
            at = slot * self.hello.primary_row_bytes
            self.chunks[key] = self._memory[at : at + self.hello.chunk_bytes]
        self.send(KeysChanged(added=added, removed=[]))
        self.send(StoreDone(job=job.job))

    def carry_out_load(self, job: LoadChunks) -> None:
        """The job's slots hold what the store has, and the engine knows which."""
        assert self.hello is not None
        assert self._memory is not None
        loaded = []
        for key, slot in zip(job.keys, job.slots, strict=True):
            if key in self.chunks:
                at = slot * self.hello.primary_row_bytes
                self._memory[at : at + self.hello.chunk_bytes] = self.chunks[key]
                loaded.append(key)
        self.send(LoadDone(job=job.job, loaded=loaded))


def main(path: str) -> None:
    """Serves until the process is killed; prints a line per message kind it has not seen before."""
    agent = FakeAgent(Path(path))
    agent.start()
    print("listening", flush=True)
    select.select([], [], [])


if __name__ == "__main__":
    main(sys.argv[1])
