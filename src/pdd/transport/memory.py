"""Streams inside one process, for tests of what is above the transport: no sockets, same contract."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from pdd.core.errors import ConnectError, ConnectionLostError, DeadlineError
from pdd.transport.base import Buffer, Listener, Stream, Transport

_PIPE_BYTES: Final = 256 * 2**10
"""What one direction holds before a sender waits, as a socket's buffers would."""


class _Pipe:
    """One direction: a bounded byte queue."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._changed = threading.Condition()
        self._is_ended = False

    def write(self, data: memoryview, deadline_s: float | None) -> None:
        while data:
            with self._changed:
                self._wait(lambda: self._is_ended or len(self._data) < _PIPE_BYTES, deadline_s)
                if self._is_ended:
                    raise ConnectionLostError("the other end closed the connection")
                part = data[: _PIPE_BYTES - len(self._data)]
                self._data += part
                self._changed.notify_all()
            data = data[part.nbytes :]

    def read(self, buffer: memoryview, deadline_s: float | None) -> int:
        with self._changed:
            self._wait(lambda: self._is_ended or bool(self._data), deadline_s)
            part = self._data[: buffer.nbytes]
            buffer[: len(part)] = part
            del self._data[: len(part)]
            self._changed.notify_all()
            return len(part)

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def _wait(self, is_ready: Callable[[], bool], deadline_s: float | None) -> None:
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not self._changed.wait_for(is_ready, timeout_s):
            raise DeadlineError("the other end did not answer in time")


class MemoryStream(Stream):
    """One end of two pipes."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, peer_address: str) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._peer_address = peer_address
        self._is_closed = False

    @property
    def peer_address(self) -> str:
        """Where the other end is, for logs."""
        return self._peer_address

    def send(self, buffers: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        """See ``Stream.send``."""
        total = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if self._is_closed:
                raise ConnectionLostError("the connection was closed here")
            self._outgoing.write(view, None if timeout_s is None else time.monotonic() + timeout_s)
            total += view.nbytes
        return total

    def recv_into(self, buffer: memoryview, *, timeout_s: float | None = None) -> int:
        """See ``Stream.recv_into``."""
        if self._is_closed:
            raise ConnectionLostError("the connection was closed here")
        num_bytes = self._incoming.read(buffer, None if timeout_s is None else time.monotonic() + timeout_s)
        if num_bytes == 0 and self._is_closed:
            raise ConnectionLostError("the connection was closed here")
        return num_bytes

    def close(self) -> None:
        """See ``Stream.close``."""
        self._is_closed = True
        self._incoming.end()
        self._outgoing.end()


class MemoryListener(Listener):
    """Takes connections of the transport that made it."""

    def __init__(self, transport: "MemoryTransport", address: str) -> None:
        self._transport = transport
        self._address = address
        self._waiting: list[MemoryStream] = []
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def address(self) -> str:
        """See ``Listener.address``."""
        return self._address

    def accept(self) -> Stream:
        """See ``Listener.accept``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._waiting))
            if self._is_closed:
                raise ConnectionLostError(f"listener at {self._address} is closed")
            return self._waiting.pop(0)

    def close(self) -> None:
        """See ``Listener.close``."""
        self._transport.forget(self._address)
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for stream in waiting:
            stream.close()

    def connect(self) -> Stream:
        """The dialling end of a new connection."""
        there, back = _Pipe(), _Pipe()
        with self._changed:
            if self._is_closed:
                raise ConnectError(f"nobody listens at {self._address}")
            self._waiting.append(MemoryStream(there, back, "memory:dialler"))
            self._changed.notify_all()
        return MemoryStream(back, there, self._address)


class MemoryTransport(Transport):
    """A network of its own: only what listens on this object can be dialled through it."""

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryListener] = {}
        self._ports = itertools.count(1)

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """See ``Transport.dial``."""
        listener = self._listeners.get(address)
        if listener is None:
            raise ConnectError(f"nobody listens at {address} (waited 0 of {timeout_s:g} s)")
        return listener.connect()

    def listen(self, address: str) -> Listener:
        """See ``Transport.listen``."""
        host, _, port = address.rpartition(":")
        bound = f"{host}:{next(self._ports)}" if port == "0" else address
        if bound in self._listeners:
            raise ConnectError(f"cannot listen on {bound}: address already in use")
        listener = MemoryListener(self, bound)
        self._listeners[bound] = listener
        return listener

    def forget(self, address: str) -> None:
        """Nobody listens at the address any more."""
        self._listeners.pop(address, None)
