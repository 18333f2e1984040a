"""NIXL (UCX) for the fast link: bytes are written into the peer's memory, by RDMA where there is any.

A stream is a TCP connection and two rings of registered memory. The connection carries what has to be in
order: who the ends are, which block was written, which was read, and small messages whole. It also says when
a stream ends. Blocks of up to 1 MiB are written into the reader's ring by NIXL. Every message takes a place
in the ring, also a small one, so a reader that waits bounds what a writer can send, and nothing here ever
blocks but its own caller.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from pdd.core.errors import ConnectionLostError, DeadlineError, RemoteProtocolError, TransportError
from pdd.transport.base import Buffer, Listener, Stream, Transport
from pdd.transport.nixl_endpoint import BLOCK_BYTES, NUM_BLOCKS, NixlEndpoint, Ring
from pdd.transport.tcp import TcpTransport

_HEAD: Final = struct.Struct("<BI")
_HELLO, _SMALL, _BLOCK, _READ = range(4)
_SMALL_BYTES: Final = 32 * 2**10
"""Up to this a message travels on the TCP connection: a write and a note of it would take longer."""
_MAX_HELLO_BYTES: Final = 2**20


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """What an end says first: its endpoint, how to write to it, and where."""

    name: str
    metadata: bytes
    ring_address: int


class NixlStream(Stream):
    """Owns the TCP connection, a ring that the peer writes, and one to write from."""

    def __init__(self, endpoint: NixlEndpoint, channel: Stream) -> None:
        self._endpoint = endpoint
        self._channel = channel
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._peer: _Hello | None = None
        self._num_free = NUM_BLOCKS
        self._num_sent = 0
        self._num_received = 0
        self._arrived: deque[memoryview] = deque()
        self._end: TransportError | None = None
        self._has_ended = False
        self._is_closed = False
        self._rings: list[Ring] = [endpoint.take_ring(), endpoint.take_ring()]
        self._ring, self._staging = self._rings
        hello = _Hello(name=endpoint.name, metadata=endpoint.metadata(), ring_address=self._ring.address)
        self._tell(_HELLO, msgspec.msgpack.encode(hello))
        self._thread = threading.Thread(target=self._listen, name="pdd-nixl-channel", daemon=True)
        self._thread.start()

    @property
    def peer_names(self) -> frozenset[str] | None:
        """See ``Stream.peer_names``: what the channel has proved."""
        return self._channel.peer_names

    @property
    def peer_address(self) -> str:
        """See ``Stream.peer_address``."""
        return self._channel.peer_address

    def send(self, buffers: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        """See ``Stream.send``."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        total = 0
        for part in _parts(buffers):
            peer, place = self._await_place(deadline_s, timeout_s)
            num_bytes = sum(view.nbytes for view in part)
            if num_bytes <= _SMALL_BYTES:
                self._tell(_SMALL, b"".join(part))
            else:
                self._write(peer, place, part, num_bytes, deadline_s)
            total += num_bytes
        return total

    def recv_into(self, buffer: memoryview, *, timeout_s: float | None = None) -> int:
        """See ``Stream.recv_into``."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._is_closed or self._has_ended or bool(self._arrived), timeout_s
            )
            self._raise_if_closed()
            if not self._arrived:
                if not is_there:
                    raise DeadlineError(f"{self.peer_address} sent nothing in {timeout_s} s")
                if self._end is not None:
                    raise self._end
                return 0
            block = self._arrived[0]
        num_bytes = min(block.nbytes, buffer.nbytes)
        buffer[:num_bytes] = block[:num_bytes]
        with self._changed:
            self._arrived[0] = block[num_bytes:]
            is_read = not self._arrived[0].nbytes
            if is_read:
                self._arrived.popleft()
        if is_read:
            with suppress(TransportError):  # what has arrived is still to be read
                self._tell(_READ, b"")
        return num_bytes

    def close(self) -> None:
        """See ``Stream.close``."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._channel.close()
        for ring in self._rings:
            self._endpoint.give_ring_back(ring)

    def _await_place(self, deadline_s: float | None, timeout_s: float | None) -> tuple[_Hello, int]:
        """There is a place in the peer's ring, which is ours now; returns the peer and the place."""
        with self._changed:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            is_free = self._changed.wait_for(
                lambda: self._is_closed or self._has_ended or (self._peer is not None and self._num_free > 0),
                left_s,
            )
            self._raise_if_closed()
            if self._has_ended:
                raise self._end or ConnectionLostError(f"{self.peer_address} closed the connection")
            if not is_free or self._peer is None:
                raise DeadlineError(f"{self.peer_address} did not read in {timeout_s} s")
            self._num_free -= 1
            place = self._num_sent % NUM_BLOCKS
            self._num_sent += 1
            return self._peer, place

    def _write(
        self, peer: _Hello, place: int, part: list[memoryview], num_bytes: int, deadline_s: float | None
    ) -> None:
        row = memoryview(self._staging.blocks[place]).cast("B")
        start = 0
        for view in part:
            row[start : start + view.nbytes] = view
            start += view.nbytes
        offset = place * BLOCK_BYTES
        self._endpoint.write(
            peer.name,
            self._staging.address + offset,
            peer.ring_address + offset,
            num_bytes,
            deadline_s=deadline_s,
        )
        self._tell(_BLOCK, b"", num_bytes)

    def _tell(self, kind: int, body: bytes, value: int | None = None) -> None:
        head = _HEAD.pack(kind, len(body) if value is None else value)
        with self._writing:
            self._channel.send([head, body] if body else [head])

    def _listen(self) -> None:
        """Reads the channel to its end."""
        try:
            head = bytearray(_HEAD.size)
            while num_bytes := self._channel.recv_into(memoryview(head)):
                self._channel.recv_exactly(memoryview(head)[num_bytes:])
                self._on_message(*_HEAD.unpack(head))
        except (TransportError, RemoteProtocolError, msgspec.MsgspecError) as error:
            self._end = ConnectionLostError(f"{self.peer_address}: {error}")
            self._channel.close()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _on_message(self, kind: int, value: int) -> None:
        body = b""
        if kind in (_HELLO, _SMALL):
            if value > (_MAX_HELLO_BYTES if kind == _HELLO else _SMALL_BYTES):
                raise RemoteProtocolError(f"a message of {value} bytes")
            filled = bytearray(value)
            self._channel.recv_exactly(memoryview(filled))
            body = bytes(filled)
        if kind == _HELLO:
            peer = msgspec.msgpack.decode(body, type=_Hello)
            self._endpoint.meet(peer.name, peer.metadata)
            with self._changed:
                self._peer = peer
                self._changed.notify_all()
        elif kind in (_SMALL, _BLOCK):
            self._on_data(body, value if kind == _BLOCK else None)
        elif kind == _READ:
            with self._changed:
                self._num_free += 1
                self._changed.notify_all()
        else:
            raise RemoteProtocolError(f"a message of kind {kind}")

    def _on_data(self, body: bytes, block_bytes: int | None) -> None:
        with self._changed:
            place = self._num_received % NUM_BLOCKS
            self._num_received += 1
            if len(self._arrived) >= NUM_BLOCKS or (block_bytes or 0) > BLOCK_BYTES:
                raise RemoteProtocolError("more than the ring holds")
            row = memoryview(self._ring.blocks[place]).cast("B")
            self._arrived.append(memoryview(body) if block_bytes is None else row[:block_bytes])
            self._changed.notify_all()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise ConnectionLostError("the connection was closed here")


class NixlListener(Listener):
    """Takes TCP connections and makes streams of them."""

    def __init__(self, endpoint: NixlEndpoint, listener: Listener) -> None:
        self._endpoint = endpoint
        self._listener = listener

    @property
    def address(self) -> str:
        """See ``Listener.address``."""
        return self._listener.address

    def accept(self) -> Stream:
        """See ``Listener.accept``."""
        while True:
            channel = self._listener.accept()
            try:
                return NixlStream(self._endpoint, channel)
            except TransportError:
                channel.close()  # that peer left before its turn came

    def close(self) -> None:
        """See ``Listener.close``."""
        self._listener.close()


class NixlTransport(Transport):
    """Streams of one NIXL endpoint.

    Args:
        channels: What carries order and small messages.

    Raises:
        ConfigurationError: If NIXL is not installed, or does not start.
    """

    def __init__(self, channels: Transport | None = None) -> None:
        self._channels = channels or TcpTransport()
        self._endpoint = NixlEndpoint()

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """See ``Transport.dial``."""
        return NixlStream(self._endpoint, self._channels.dial(address, timeout_s=timeout_s))

    def listen(self, address: str) -> Listener:
        """See ``Transport.listen``."""
        return NixlListener(self._endpoint, self._channels.listen(address))


def _parts(buffers: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """The bytes of the buffers in runs of at most a block, without copying them."""
    part: list[memoryview] = []
    room = BLOCK_BYTES
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest.nbytes:
            taken, rest = rest[:room], rest[room:]
            part.append(taken)
            room -= taken.nbytes
            if room == 0:
                yield part
                part, room = [], BLOCK_BYTES
    if part:
        yield part
