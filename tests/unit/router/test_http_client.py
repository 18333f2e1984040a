"""The one HTTP chunk that most reads are, and which connections stay open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdd.config.load import parse_config
from pdd.core.errors import ConnectError
from pdd.router import http_client
from pdd.router.fleet import Fleet
from pdd.router.http_client import HttpClient
from pdd.router.http_connection import whole_chunk


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"5\r\nhello\r\n", b"hello"),
        (b"1a\r\n" + b"x" * 26 + b"\r\n", b"x" * 26),
        (b"00005\r\nhello\r\n", b"hello"),
        (b"2\r\n\r\n\r\n", b"\r\n"),
        (b"0\r\n\r\n", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b""),
        (b"5\r\nhello\r\n5\r\nhello\r\n", b""),
        (b"5\r\nhell", b""),
        (b"6\r\nhello\r\n", b""),
        (b"5;a=b\r\nhello\r\n", b""),
        (b"-5\r\nhello\r\n", b""),
        (b"xyz\r\nhello\r\n", b""),
        (b"\r\nhello\r\n", b""),
        (b"hello", b""),
        (b"", b""),
    ],
)
def test_only_one_whole_chunk_is_taken_at_once(data: bytes, body: bytes) -> None:
    assert whole_chunk(data) == body


class Server:
    """Answers every request with an empty 200 and counts its connections."""

    def __init__(self) -> None:
        self.made = 0
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        self.open += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.open -= 1
        writer.close()

    async def until_open(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.open != count:  # noqa: ASYNC110 - nothing says when a socket has closed
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    client = HttpClient(
        f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", {}, connect_timeout_s=3.0
    )
    try:
        yield server, client
    finally:
        await client.close()
        listening.close()


async def ask(client: HttpClient, *, pooled: bool = True) -> None:
    async with client.exchange("GET", "/", pooled=pooled) as answer:
        await answer.end()
        assert answer.status == 200


async def test_a_connection_is_used_again() -> None:
    async with running() as (server, client):
        for _ in range(5):
            await ask(client)
        assert (server.made, server.open) == (1, 1)


async def test_a_connection_outside_the_pool_is_closed_after_use() -> None:
    async with running() as (server, client):
        await ask(client)
        for _ in range(5):
            await ask(client, pooled=False)
        assert server.made == 6
        await server.until_open(1)


async def test_connections_that_rest_are_closed_though_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "POOL_IDLE_S", 0.05)
    async with running() as (server, client):
        for _ in range(3):
            await asyncio.gather(*(ask(client) for _ in range(4)))
            await server.until_open(0)
        await ask(client)
        await server.until_open(0)
        assert server.made == 3 * 4 + 1


async def test_how_long_a_connection_may_take_is_configured_for_engines_and_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a starved host three seconds are nothing: whoever runs one says so once, for every connection."""

    async def hang(*_args: object, **_kwargs: object) -> None:
        await asyncio.Event().wait()

    engine = {"id": "p0", "role": "prefill", "port": 1, "data_port": 2, "control_port": 3}
    values = {
        "model": {"path": "m", "name": "m"},
        "router": {"connect_timeout_s": "20ms"},
        "engines": [engine],
    }
    fleet = Fleet(parse_config(values, source="test", environ={}))
    state = fleet.engines["p0"]
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", hang)
    try:
        with pytest.raises(ConnectError, match=r"p0 does not answer .*: no connection within 0.02 s"):
            await state.client.models(timeout_s=60)
        with pytest.raises(ConnectError, match=r"no connection within 0.02 s"):
            await ask(state.agent._control)
    finally:
        await state.close()
        await fleet.close()
