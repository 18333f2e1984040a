"""The engine's connection to the agent beside it: a Unix socket, a thread, and what is known through them.

Two threads use it. The scheduler thread queues messages, asks which chunks the store holds and collects
finished jobs; nothing it calls waits for the agent. A daemon thread connects, reconnects at most once a
second, and moves bytes when the scheduler does not. Whoever drains holds the one lock, for as long as the
bytes at hand take.

If the *agent* breaks the protocol, this side stops talking and waits for the agent to close, since a copy of
an open job may still be running. Knows neither vLLM nor torch.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from pdd.core.errors import ConfigurationError, RemoteProtocolError
from pdd.engine.mirror import FinishedJob, LinkState, Mirror
from pdd.wire.local import AgentDecoder, BeginTransfer, Hello, LoadChunks, Message, StoreChunks, encode

RECONNECT_S: Final = 1.0
HELLO_TIMEOUT_S: Final = 5.0
NOT_READY_S: Final = 0.1
"""How soon to ask again for a hello that the engine cannot say yet."""
COALESCE_S: Final = 0.02
"""The daemon thread rests so long after a read. The scheduler thread reads for itself when it must know, so
this only bounds how often a busy agent wakes the engine's process: 50 times a second."""
RECEIVE_BYTES: Final = 256 * 1024
MAX_QUEUED_BYTES: Final = 64 * 2**20
"""With more unsent bytes than this the agent is stuck: touches are dropped, everything else is kept."""


class AgentLink:
    """One engine's side of the Unix socket to its agent."""

    def __init__(
        self,
        socket_path: Path,
        *,
        hello: Callable[[], Hello | None],
        primary_fd: int,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is connected; ``start`` does that.

        Args:
            socket_path: Where the agent listens.
            hello: Makes this engine's first message; None means not yet, ``ConfigurationError`` means never.
                Called in the daemon thread.
            primary_fd: File descriptor of the primary tier's shared memory; duplicated here.
            logger: Takes one line for every change of state.
            clock: Monotonic seconds.
        """
        self._path = socket_path
        self._make_hello = hello
        self._primary_fd = os.dup(primary_fd)
        self._logger = logger
        self._clock = clock
        self._lock = threading.RLock()
        self._mirror = Mirror()
        self._socket: socket.socket | None = None
        self._decoder = AgentDecoder()
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._closing = False
        self._last_trouble = ""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="pdd-agent-link", daemon=True)

    # What the scheduler thread calls.

    def start(self) -> None:
        """The daemon thread runs and connects as soon as there is an agent."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether the agent has welcomed this engine and is still there."""
        return self._mirror.state is LinkState.UP

    @property
    def num_keys(self) -> int:
        """Chunks the store holds, as far as known here."""
        return len(self._mirror.keys)

    def holds(self, key: bytes) -> bool:
        """Whether the store holds a chunk. What is not known to be there is looked for in unread messages.

        The agent writes the news of a chunk before it tells anyone that the chunk has landed, so a request
        that was submitted after that finds it here.
        """
        if key in self._mirror.keys:
            return True
        self.drain()
        return key in self._mirror.keys

    def begin(self, order: BeginTransfer) -> None:
        """The agent will push this request's chunks. The order is repeated should the agent restart."""
        with self._lock:
            self._send(self._mirror.begin(order))

    def finish(self, request: str) -> None:
        """The agent knows that no more chunks come, if it had an order for the request."""
        with self._lock:
            self._send(self._mirror.finish(request))

    def store(self, job: StoreChunks) -> None:
        """The job ends after the agent has copied these primary slots, or has gone."""
        with self._lock:
            self._send(self._mirror.submit_store(job))

    def load(self, job: LoadChunks) -> None:
        """The job ends after the agent has filled these primary slots, or has gone."""
        with self._lock:
            self._send(self._mirror.submit_load(job))

    def touch(self, keys: Collection[bytes]) -> None:
        """Those of the keys that are in the store become the last to be evicted, the last key last."""
        with self._lock:
            if self._out_bytes < MAX_QUEUED_BYTES:
                self._send(self._mirror.touch(keys))

    def take_finished(self) -> list[FinishedJob]:
        """The jobs that ended since the last call."""
        with self._lock:
            if self._mirror.has_open_jobs:
                self._receive()
            return self._mirror.take_finished()

    def drain(self) -> None:
        """Everything the agent has sent so far is known here. Does not wait."""
        with self._lock:
            self._receive()

    def wait_for_jobs(self, timeout_s: float) -> bool:
        """True once no job is open, False if some still are after the timeout. Waits: not for a step."""
        deadline_s = self._clock() + timeout_s
        while True:
            with self._lock:
                self._receive()
                if not self._mirror.has_open_jobs:
                    return True
                sock = self._socket
            remaining_s = deadline_s - self._clock()
            if remaining_s <= 0 or sock is None:
                return False
            _poll({sock: select.POLLIN}, min(remaining_s, 0.05))

    def close(self) -> None:
        """The connection and its thread have ended; no further call is allowed."""
        with self._lock:
            self._closing = True
            self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * HELLO_TIMEOUT_S)
        with self._lock:
            self._mirror.end()
            self._lose("")
            for descriptor in (self._primary_fd, self._wake_read, self._wake_write):
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    # Under the lock.

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            data = memoryview(encode(message))
            self._out.append(data)
            self._out_bytes += len(data)
        self._flush()
        if self._out:
            self._wake()

    def _flush(self) -> None:
        while self._out and self._socket is not None:
            try:
                sent = self._socket.send(self._out[0])
            except BlockingIOError:
                return
            except OSError:
                # Only what the agent closes ends jobs: that shows when its end is read.
                self._forget_output()
                return
            self._out_bytes -= sent
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

    def _forget_output(self) -> None:
        self._out.clear()
        self._out_bytes = 0

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"connection lost: {error.strerror}")
                return
            if not data:
                self._lose("the agent closed the connection")
                return
            if self._mirror.state is not LinkState.ENDING:
                self._take(data)

    def _take(self, data: bytes) -> None:
        was_up = self.connected
        try:
            for message in self._decoder.feed(data):
                self._send(self._mirror.handle(message))
        except RemoteProtocolError as error:
            self._end_talk(str(error))
            return
        if self.connected and not was_up:
            self._last_trouble = ""
            self._logger.info("agent at %s connected; its store holds %d chunks", self._path, self.num_keys)

    def _end_talk(self, reason: str) -> None:
        self._say_trouble(reason)
        self._mirror.end()
        self._forget_output()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _lose(self, reason: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if self._mirror.state is not LinkState.ENDING:
                self._say_trouble(reason)
        self._mirror.lost()
        self._forget_output()
        self._decoder = AgentDecoder()
        self._wake()

    def _say_trouble(self, reason: str) -> None:
        # Retried every second: said once until it changes or ends.
        if reason != self._last_trouble:
            self._last_trouble = reason
            self._logger.warning("agent at %s: %s", self._path, reason)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    # The daemon thread.

    def _run(self) -> None:
        while not self._closing:
            if self._socket is not None:
                self._attend()
                continue
            try:
                pause_s = self._connect()
            except ConfigurationError as error:
                self._logger.error("KV transfer is off: %s", error)
                return
            if pause_s:
                self._sleep(pause_s)

    def _connect(self) -> float:
        """Seconds to wait before the next attempt; 0 when connected."""
        hello = self._make_hello()
        if hello is None:
            return NOT_READY_S
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(HELLO_TIMEOUT_S)
            sock.connect(str(self._path))
            data = encode(hello)
            sent = socket.send_fds(sock, [data], [self._primary_fd])
            sock.sendall(data[sent:])
            sock.setblocking(False)  # noqa: FBT003  # its only parameter
        except OSError as error:
            sock.close()
            self._say_trouble(f"cannot connect: {error.strerror or error}")
            return RECONNECT_S
        with self._lock:
            self._socket = sock
            self._mirror.greeted()
        return 0.0

    def _attend(self) -> None:
        """One round of the connection: waits for the agent, the scheduler's wake-up, or room to send."""
        with self._lock:
            sock, sending = self._socket, bool(self._out)
        if sock is None:
            return
        interest = select.POLLIN | (select.POLLOUT if sending else 0)
        ready = _poll({sock: interest, self._wake_read: select.POLLIN}, None)
        if self._wake_read in ready:
            self._swallow_wakes()
        with self._lock:
            self._flush()
            if sock in ready:
                self._receive()
            gone, idle = self._socket is None, not self._out
        if self._closing:
            return
        if gone:
            self._sleep(RECONNECT_S)
        elif sock in ready and idle:
            self._sleep(COALESCE_S)

    def _sleep(self, seconds: float) -> None:
        """Rests, but not from ``close``."""
        deadline_s = self._clock() + seconds
        while not self._closing and (remaining_s := deadline_s - self._clock()) > 0:
            if _poll({self._wake_read: select.POLLIN}, remaining_s):
                self._swallow_wakes()
                if self._out:
                    return

    def _swallow_wakes(self) -> None:
        with contextlib.suppress(OSError):
            os.read(self._wake_read, 4096)


def _poll(interest: Mapping[socket.socket | int, int], timeout_s: float | None) -> set[socket.socket | int]:
    """Those that are ready, in error or closed; none after the timeout.

    Not ``select``: it cannot wait for descriptors above 1023, and an engine may have many.
    """
    poller = select.poll()
    names: dict[int, socket.socket | int] = {}
    for item, mask in interest.items():
        descriptor = item if isinstance(item, int) else item.fileno()
        if descriptor < 0:
            # Closed by the other thread, which saw the agent's end first.
            return {item}
        names[descriptor] = item
        poller.register(descriptor, mask)
    timeout_ms = None if timeout_s is None else timeout_s * 1000
    return {names[descriptor] for descriptor, _ in poller.poll(timeout_ms)}
