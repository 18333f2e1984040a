"""Follows the KV events of one engine over ZeroMQ; what they mean is ``kv_events``.

Batches come from a publisher that drops what a slow or absent reader does not take, so they are numbered,
and a second socket repeats the latest ten thousand. Whatever goes wrong here costs knowledge, never a
request.

Source:
    vllm/distributed/kv_events.py@0.32.0 (``ZmqEventPublisher``: frames, ``_service_replay``, ``END_SEQ``).
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

from pdd.config.load import KvEventAddresses
from pdd.router.kv_events import KvEventReader

log = logging.getLogger(__name__)

SEQ_BYTES = 8
NO_MORE = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
REPLAY_TIMEOUT_S = 2.0
"""The publisher looks for such requests ten times a second."""
REPLAY_LOT = 64
"""Repeated batches read in one go; streams of tokens go on in between."""
REPLAY_PAUSE_S = 1.0
"""Between two requests; batches that come meanwhile wait in the socket."""
RECONNECT_MS = 200
MAX_RECONNECT_MS = 5000
KEEPALIVE_IDLE_S = 30
RETRY_S = 5.0
MAX_QUEUED = 1000
"""Between the socket and the reader; the rest waits in the socket."""
MAX_WAITING_BATCHES = 100_000
"""In the socket; as many as vLLM keeps on its side."""


def end_context(context: zmq.asyncio.Context) -> None:
    """The context, whose sockets are all closed, ends in a thread of its own.

    ZeroMQ waits there for its own threads, in C code that no timeout or signal interrupts: an event loop must
    not wait for that.
    """
    threading.Thread(target=context.term, name="zmq-end", daemon=True).start()


class KvEventFollower:
    """One engine's publisher.

    Args:
        context: Of the whole router.
        addresses: Where the engine publishes and repeats.
        reader: Takes what comes.
    """

    def __init__(
        self, *, context: zmq.asyncio.Context, addresses: KvEventAddresses, reader: KvEventReader
    ) -> None:
        self._context = context
        self._addresses = addresses
        self._reader = reader

    async def run(self) -> None:
        """Follow the engine for ever; an address that cannot be reached is tried on and on."""
        while self._addresses.follow is not None:
            try:
                await self._follow(self._addresses.follow)
            except* zmq.ZMQError as errors:  # a group: its tasks end together
                log.warning("KV events at %s: %s", self._addresses.follow, errors.exceptions[0])
            await asyncio.sleep(RETRY_S)

    async def _follow(self, address: str) -> None:
        news: asyncio.Queue[list[bytes] | None] = asyncio.Queue(MAX_QUEUED)
        async with self._socket(zmq.SUB) as socket, asyncio.TaskGroup() as pumps:
            monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
            try:
                socket.subscribe(b"")
                socket.connect(address)  # after the monitor, which tells only what happens from then on
                pumps.create_task(_report_connections(monitor, news))
                pumps.create_task(_receive(socket, news))
                while True:
                    await self._take(await news.get())
            finally:
                socket.disable_monitor()
                monitor.close(linger=0)

    async def _take(self, frames: list[bytes] | None) -> None:
        """What came is read; None is a new connection, and behind it may be another engine than before."""
        if frames is None:
            self._reader.forget()
            await self._catch_up()
        elif (batch := _batch(frames)) is None:
            self._reader.note_bad()
        elif not self._reader.take(*batch):
            await self._catch_up()
            self._reader.take_late(*batch)
            await asyncio.sleep(REPLAY_PAUSE_S)

    async def _catch_up(self) -> None:
        """What the engine did since ``next_seq`` is read, as far as it still knows."""
        if self._addresses.follow_replay is None:
            return
        repeated: list[tuple[int, bytes]] = []
        async with self._socket(zmq.DEALER) as socket:
            socket.connect(self._addresses.follow_replay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    await socket.send_multipart([b"", self._reader.next_seq.to_bytes(SEQ_BYTES, "big")])
                    while (frames := await socket.recv_multipart())[-2:-1] != [NO_MORE]:
                        if (batch := _batch(frames[1:])) is None:
                            self._reader.note_bad()
                        else:
                            repeated.append(batch)
        for start in range(0, len(repeated), REPLAY_LOT):
            self._reader.take_repeated(repeated[start : start + REPLAY_LOT])
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def _socket(self, kind: int) -> AsyncIterator[zmq.asyncio.Socket]:
        socket = self._context.socket(kind)
        try:
            socket.linger = 0
            socket.rcvhwm = MAX_WAITING_BATCHES
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a host that is gone without a word
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
            yield socket
        finally:
            socket.close()


async def _receive(socket: zmq.asyncio.Socket, news: asyncio.Queue[list[bytes] | None]) -> None:
    while True:
        await news.put(await socket.recv_multipart())


async def _report_connections(monitor: zmq.asyncio.Socket, news: asyncio.Queue[list[bytes] | None]) -> None:
    while True:
        await monitor.recv_multipart()
        await news.put(None)


def _batch(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Number and content of the frames of one batch, or None if they are none."""
    if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
        return None
    return int.from_bytes(frames[1], "big"), frames[2]
