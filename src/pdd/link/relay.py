"""TCP connections relayed over a pair of lines.

Owns sockets and timers of one emulated line; what arrives when is decided in ``line``. A connection's life
is carried over as a real line would: its set-up takes a round trip, a half-close and a reset arrive after the
bytes before them, and a receiver that does not read makes the sender stop.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from pdd.link.line import End, Flow, Item, Line

MIN_QUEUE_BYTES = 256 * 2**10
QUEUE_S = 0.05
"""A flow may hold the bandwidth-delay product and 50 ms more, but no less than 256 KiB; then its source is
not read until a quarter of that has gone. About what a router's buffer holds."""
RESUME_RATIO = 0.75

TICK_S = 0.001
"""The timer's grain, which is libuv's. Anything shorter would make a busy line spin on a whole core."""

KERNEL_BUFFER_BYTES = 256 * 2**10
"""Receive buffer of the relayed sockets: the kernel's own, growing one would hide megabytes in flight."""

_LINGER_RESET = struct.pack("ii", 1, 0)


class Wire:
    """A line and its timer: delivers what arrives to the flows' receivers.

    Args:
        line: Where the bytes travel.
        loop: Gives timers. Time is the system's clock, since uvloop's own is rounded to milliseconds.
    """

    def __init__(self, line: Line, loop: asyncio.AbstractEventLoop) -> None:
        self.line = line
        self._loop = loop
        self._receivers: dict[Flow, Callable[[Item], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def open(self, receiver: Callable[[Item], None]) -> Flow:
        """A new flow, whose items will be given to ``receiver``."""
        flow = Flow()
        self._receivers[flow] = receiver
        return flow

    def send(self, flow: Flow, item: Item) -> None:
        """The item is on its way."""
        self.line.send(flow, item, time.monotonic())
        self._schedule()

    def close(self, flow: Flow) -> None:
        """The flow is gone, with all that was on its way."""
        self.line.drop(flow)
        self._receivers.pop(flow, None)

    def hold(self, flow: Flow, *, held: bool) -> None:
        """The flow stands still, or moves again."""
        if held:
            self.line.hold(flow)
        else:
            self.line.release(flow, time.monotonic())
        self._schedule()

    def queue_limit_bytes(self) -> int:
        """How much one flow may have waiting and on its way."""
        return max(MIN_QUEUE_BYTES, int(self.line.rate_bytes_per_s * (self.line.delay_s + QUEUE_S)))

    def _schedule(self) -> None:
        due_s = self.line.next_event_s()
        if self._timer is not None:
            if due_s is not None and self._timer_s <= due_s:
                return
            self._timer.cancel()
        self._timer = None
        if due_s is not None:
            self._timer_s = due_s
            self._timer = self._loop.call_later(max(TICK_S, due_s - time.monotonic()), self._run)

    def _run(self) -> None:
        self._timer = None
        for flow, item in self.line.advance(time.monotonic()):
            if receiver := self._receivers.get(flow):
                receiver(item)
        self._schedule()


class _Side(asyncio.Protocol):
    """One of the two sockets of a relayed connection."""

    def __init__(self, connection: "Connection", wire: Wire) -> None:
        self._connection = connection
        self._wire = wire
        self.peer: _Side | None = None
        self.transport: asyncio.Transport | None = None
        self.flow = wire.open(self._arrived)
        self.received_bytes = 0
        self._started = False
        self._early: list[Item] = []
        self._reading = False
        self.backlogged = False
        self._read_all = False
        self._wrote_all = False
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.pause_reading()
        self._connection.made(self)

    def start_reading(self) -> None:
        """Bytes of this socket enter the line from now on."""
        self._started = self._reading = True
        for item in self._early:
            self._wire.send(self.flow, item)
        self._early.clear()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._enter(data)
        if self.transport is not None and (self._is_full() or not self._started):
            self.transport.pause_reading()
            self._reading = False

    def eof_received(self) -> bool:
        self._read_all = True
        self._enter(End.EOF)
        self._close_if_done()
        return True  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if exc is not None:
            self._wire.send(self.flow, End.RESET)
        self._connection.lost(self)

    def _enter(self, item: Item) -> None:
        if self._started:
            self._wire.send(self.flow, item)
        else:  # uvloop reads once after connection_made, even if that paused reading
            self._early.append(item)

    def pause_writing(self) -> None:
        self.backlogged = True

    def resume_writing(self) -> None:
        self.backlogged = False
        if self.peer is not None:
            self.peer.read_on_if_room()

    def read_on_if_room(self) -> None:
        """Reading goes on, if it had stopped for a full queue that no longer is."""
        if self._reading or self.lost or self.transport is None or not self._started:
            return
        has_room = self.flow.queued_bytes < RESUME_RATIO * self._wire.queue_limit_bytes()
        if has_room and not self._peer_backlogged():
            self.start_reading()

    def _is_full(self) -> bool:
        return self.flow.queued_bytes > self._wire.queue_limit_bytes() or self._peer_backlogged()

    def _peer_backlogged(self) -> bool:
        return self.peer is not None and self.peer.backlogged

    def _arrived(self, item: Item) -> None:
        """What this side read has crossed the line: it goes out of the other side."""
        peer = self.peer
        if peer is None or peer.transport is None or peer.lost:
            return
        if item is End.RESET:
            peer.reset()
        elif item is End.EOF:
            peer.end_writing()
        else:
            peer.received_bytes += len(item)
            self._connection.count(peer, len(item))
            peer.transport.write(item)
            self.read_on_if_room()

    def end_writing(self) -> None:
        """The socket's other end will see an end of file after what was written."""
        self._wrote_all = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._read_all and self._wrote_all and self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        """The socket is closed at once, with a reset to whoever is at its other end."""
        if self.transport is None or self.lost:
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.transport.abort()

    def close_flow(self) -> None:
        """What this side sent is forgotten."""
        self._wire.close(self.flow)


@dataclass(slots=True)
class Traffic:
    """Payload bytes that have crossed the line."""

    to_target_bytes: int = 0
    to_client_bytes: int = 0


class Connection:
    """A client's connection, the one to the target, and what travels between.

    Args:
        forward: Where it came in; knows the target and is told when the connection is over.
    """

    def __init__(self, forward: "Forward") -> None:
        self._forward = forward
        self.client = _Side(self, forward.to_target)
        self.target: _Side | None = None
        self._dialling: asyncio.Task[None] | None = None

    def made(self, side: _Side) -> None:
        """One of the sockets is connected."""
        if side is self.client:
            self._forward.connections.add(self)
            self.hold(held=self._forward.held)
            self._dialling = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        """The connection is established a round trip after the client asked for it."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._forward.to_target.line.delay_s)
        await self._forward.moving.wait()
        target = _Side(self, self._forward.to_client)
        try:
            sock = await _connect(self._forward.target)
            await loop.create_connection(lambda: target, sock=sock)
        except OSError:
            target.close_flow()
            await asyncio.sleep(self._forward.to_client.line.delay_s)
            self.client.reset()
            return
        target.peer, self.client.peer = self.client, target
        self.target = target
        self.hold(held=self._forward.held)
        target.start_reading()
        await asyncio.sleep(self._forward.to_client.line.delay_s)
        self.client.start_reading()

    def hold(self, *, held: bool) -> None:
        """Bytes in both directions stand still, or move again."""
        self._forward.to_target.hold(self.client.flow, held=held)
        if self.target is not None:
            self._forward.to_client.hold(self.target.flow, held=held)

    def cut(self) -> None:
        """Both ends see a reset, now."""
        if self._dialling is not None:
            self._dialling.cancel()
        for side in (self.client, self.target):
            if side is not None:
                side.close_flow()
                side.reset()

    def count(self, receiver: _Side, num_bytes: int) -> None:
        """Payload has crossed the line."""
        traffic = self._forward.traffic
        if receiver is self.client:
            traffic.to_client_bytes += num_bytes
        else:
            traffic.to_target_bytes += num_bytes

    def lost(self, side: _Side) -> None:
        """One of the sockets is gone; when both are, so is the connection."""
        other = self.target if side is self.client else self.client
        if self.target is None and self._dialling is not None:
            self._dialling.cancel()
        if other is None or other.lost:
            self.client.close_flow()
            if self.target is not None:
                self.target.close_flow()
            self._forward.connections.discard(self)


class Forward:
    """One listening address of the line, and where it leads.

    Args:
        listen: ``(host, port)``; port 0 takes a free one.
        target: ``(host, port)``.
        to_target: The line from the clients to the target.
        to_client: The line back.
    """

    def __init__(
        self, *, listen: tuple[str, int], target: tuple[str, int], to_target: Wire, to_client: Wire
    ) -> None:
        self.listen = listen
        self.target = target
        self.to_target = to_target
        self.to_client = to_client
        self.traffic = Traffic()
        self.connections: set[Connection] = set()
        self.held = False
        self.moving = asyncio.Event()
        self.moving.set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """The address is listened at; ``listen`` holds the port that was taken.

        Raises:
            OSError: If the address cannot be bound.
        """
        sock = await _bound(self.listen)
        self.listen = (self.listen[0], sock.getsockname()[1])
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self).client, sock=sock)

    def hold(self, *, held: bool) -> None:
        """All bytes of this forward stand still, or move again."""
        self.held = held
        if held:
            self.moving.clear()
        else:
            self.moving.set()
        for connection in self.connections:
            connection.hold(held=held)

    def cut(self) -> int:
        """All connections are reset; returns how many there were."""
        connections = list(self.connections)
        for connection in connections:
            connection.cut()
        return len(connections)

    async def close(self) -> None:
        """Nothing is listened at any more and every connection is gone."""
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.sleep(0)


async def _bound(address: tuple[str, int]) -> socket.socket:
    sock = await _socket_for(address)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


async def _connect(address: tuple[str, int]) -> socket.socket:
    sock = await _socket_for(address)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _socket_for(address: tuple[str, int]) -> socket.socket:
    infos = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
    sock = socket.socket(*infos[0][:3])
    sock.setblocking(False)  # noqa: FBT003  # the standard library's signature
    # Before listen() and connect(), since the window scale is agreed on with the first packet.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BUFFER_BYTES)
    return sock
