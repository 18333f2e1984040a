"""Clients in one process: open streams at a given rate, check every token, watch what the router uses.

``python -m pdd.cli.router_bench.load '{"port": ..., "streams": ..., ...}'`` prints the result as JSON.
"""

import asyncio
import statistics
import sys
import time
from typing import cast

import httptools
import msgspec
import uvloop

from pdd.cli.router_bench import frames
from pdd.cli.router_bench.usage import cpu_s, resident_bytes


class Load(msgspec.Struct, kw_only=True, frozen=True):
    """What to ask for.

    Args:
        port: Of the router.
        router_pid: Its process, leader of its process group.
        streams: How many answers, each over a connection of its own.
        tokens: Of each answer.
        interval_s: Between tokens of one answer; 0 is as fast as possible.
        ramp_s: Time over which the streams are begun.
        settle_s: Time after the last one has begun, until handoffs are over.
        window_s: Time over which the router is watched while all streams are open and nothing else happens;
            0 if the streams end too soon for that.
    """

    port: int
    router_pid: int
    streams: int
    tokens: int
    interval_s: float
    ramp_s: float
    settle_s: float = 0.0
    window_s: float = 0.0


class Window(msgspec.Struct, kw_only=True, frozen=True):
    """What the router used while all streams were open."""

    tokens: int
    cpu_s: float
    resident_bytes: int
    open_streams: int


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """What came.

    Args:
        tokens: Tokens that came in their place.
        lost_events: Tokens that did not, or came twice, or out of order.
        errors: Streams that did not end as they should.
        first_byte_s: From the request to the first byte of the answer's body, sorted.
        elapsed_s: From the first request to the last byte.
        cpu_s: What the router used in that time.
        window: What it used in a quiet part of it.
        streams: How many were asked for.
    """

    tokens: int
    lost_events: int
    errors: list[str]
    first_byte_s: list[float]
    elapsed_s: float
    cpu_s: float
    window: Window | None
    streams: int

    def first_byte_percentile_s(self, percent: int) -> float | None:
        """The first-byte time that so many percent of the streams did not exceed."""
        times_s = self.first_byte_s
        if len(times_s) < 2:
            return times_s[0] if times_s else None
        return statistics.quantiles(times_s, n=100, method="inclusive")[percent - 1]


class Delta(msgspec.Struct):
    """New text."""

    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """The part of a choice we check."""

    delta: Delta


class Chunk(msgspec.Struct):
    """One event of a chat stream, or an error."""

    choices: list[ChunkChoice] = []


_decode = msgspec.json.Decoder(Chunk).decode


class ClientConnection(asyncio.Protocol):
    """One client: sends the request when connected and checks the answer."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_byte_s: float | None = None
        self.text: list[str] = []
        self.saw_done = False
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._sent_s = time.perf_counter()  # the loop's clock counts milliseconds
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        for future in (self.done, self.begun):
            if not future.done():
                future.set_exception(exc or ConnectionError("the router closed the connection"))
                future.exception()  # looked at here or by nobody

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if self.first_byte_s is None:
            self.first_byte_s = time.perf_counter() - self._sent_s
            self.begun.set_result(None)
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                self.saw_done = True
            elif line.startswith(b"data: "):
                self.text.extend(c.delta.content for c in _decode(line[6:]).choices if c.delta.content)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if not self.done.done():
            self.done.set_result(None)


def request_bytes(load: Load) -> bytes:
    """The request every client sends; ``min_p`` tells the fakes their pace."""
    body = msgspec.json.encode(
        {
            "model": frames.MODEL,
            "messages": [{"role": "user", "content": "Say what you were built to say."}],
            "max_tokens": load.tokens,
            "min_p": load.interval_s,
            "temperature": 0,
            "stream": True,
        }
    )
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def run(load: Load) -> Result:
    """All answers have come, or failed."""
    loop = asyncio.get_running_loop()
    request, started_s, used_s = request_bytes(load), loop.time(), cpu_s(load.router_pid)
    clients: list[ClientConnection] = []

    async def ask(number: int) -> None:
        await asyncio.sleep(load.ramp_s * number / load.streams)
        _, client = await loop.create_connection(lambda: ClientConnection(request), "127.0.0.1", load.port)
        clients.append(client)
        await client.begun

    await asyncio.gather(*(ask(number) for number in range(load.streams)), return_exceptions=True)
    window = await watch(load, clients) if load.window_s else None
    await asyncio.gather(*(client.done for client in clients), return_exceptions=True)
    elapsed_s, used_s = loop.time() - started_s, cpu_s(load.router_pid) - used_s
    return check(load, clients, elapsed_s=elapsed_s, used_s=used_s, window=window)


async def watch(load: Load, clients: list[ClientConnection]) -> Window:
    """What the router uses while nothing but tokens comes."""
    await asyncio.sleep(load.settle_s)
    used_s, tokens = cpu_s(load.router_pid), sum(len(client.text) for client in clients)
    await asyncio.sleep(load.window_s)
    return Window(
        tokens=sum(len(client.text) for client in clients) - tokens,
        cpu_s=cpu_s(load.router_pid) - used_s,
        resident_bytes=resident_bytes(load.router_pid),
        open_streams=sum(not client.done.done() for client in clients),
    )


def check(
    load: Load,
    clients: list[ClientConnection],
    *,
    elapsed_s: float,
    used_s: float,
    window: Window | None,
) -> Result:
    """Every token counted."""
    good, lost, errors = 0, 0, []
    for client in clients:
        words = "".join(client.text).split(" ")[1:]
        right = sum(f" {got}" == frames.word(i) for i, got in enumerate(words[: load.tokens]))
        good += right
        lost += load.tokens - right + max(0, len(words) - load.tokens)
        if client.done.exception() is not None or not client.saw_done:
            errors.append(repr(client.done.exception() or "no [DONE]"))
    missing = load.streams - len(clients)
    return Result(
        tokens=good,
        lost_events=lost + missing * load.tokens,
        errors=sorted(set(errors)) + ["could not connect"] * bool(missing),
        first_byte_s=sorted(c.first_byte_s for c in clients if c.first_byte_s is not None),
        elapsed_s=elapsed_s,
        cpu_s=used_s,
        window=window,
        streams=load.streams,
    )


if __name__ == "__main__":
    print(msgspec.json.encode(uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Load)))).decode())
