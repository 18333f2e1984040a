"""A connection's socket on loan: what the connection knows when it is back, and the order of the bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdd.core.errors import DeadlineError
from pdd.router.fastpath.lanes import News
from pdd.router.http_connection import Connection, Gate
from pdd.router.sse import TokenEvents

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Borrower:
    """Says when the engine was last heard."""

    def __init__(self) -> None:
        self.last_s = 0.0

    def heard_s(self) -> float:
        """As told."""
        return self.last_s

    def note(self, news: News) -> None:
        """Not called."""

    def take_back(self) -> None:
        """Not called."""


class Rig:
    """A connection in the middle of a streamed answer, its server's end, and what its reader was given."""

    def __init__(self, connection: Connection, server: asyncio.StreamWriter) -> None:
        self.connection = connection
        self.server = server
        self.got = b""
        self.then_calls = 0

    def read(self, data: bytes) -> bool:
        """Takes body bytes."""
        self.got += data
        return False

    def then(self) -> None:
        """The stream stands before a chunk."""
        self.then_calls += 1

    async def until(self, got: bytes) -> None:
        """Wait until the reader has these bytes."""
        async with asyncio.timeout(30):
            while self.got != got:  # noqa: ASYNC110 - a socket's bytes come when they come
                await asyncio.sleep(0.001)


@asynccontextmanager
async def streaming() -> AsyncIterator[Rig]:
    """A rig over loopback whose first chunk, ``ab``, was read."""
    made: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.set_result(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(on_free=lambda _: None, on_lost=lambda _: None),
        *server.sockets[0].getsockname(),
    )
    rig = Rig(connection, await made)
    connection.send(b"GET / HTTP/1.1\r\n\r\n", rig.read)
    rig.server.write(HEAD + b"2\r\nab\r\n")
    await rig.until(b"ab")
    try:
        yield rig
    finally:
        connection.abort()
        rig.server.close()
        server.close()
        await asyncio.sleep(0)


async def test_what_was_heard_on_loan_counts_for_the_idle_timeout() -> None:
    async with streaming() as rig:
        loop, borrower = asyncio.get_running_loop(), Borrower()
        ended = asyncio.create_task(rig.connection.end(idle_timeout_s=0.05))
        await asyncio.sleep(0)
        assert rig.connection.lend(borrower) is not None
        borrower.last_s = loop.time() + 1000.0
        rig.connection.take_back()
        await asyncio.sleep(0.1)  # the connection's own timer runs out meanwhile
        assert not ended.done()
        ended.cancel()


async def test_silence_on_loan_is_silence() -> None:
    async with streaming() as rig:
        assert rig.connection.lend(Borrower()) is not None
        with pytest.raises(DeadlineError):
            await rig.connection.end(idle_timeout_s=0.01)
        rig.connection.take_back()


async def test_bytes_that_are_held_back_stay_before_those_that_come_later() -> None:
    async with streaming() as rig:
        rig.connection.data_received(b"3\r\nc")
        rig.connection.before_chunk(b"e\r\n", rig.then)
        rig.connection.data_received(b"de\r\n2\r\nf")
        await asyncio.sleep(0)
        assert (rig.got, rig.then_calls) == (b"abcde", 1)
        gate = Gate()
        gate.add(rig.connection)
        gate.close()
        gate.open()
        rig.connection.data_received(b"g\r\n1\r\nh\r\n")
        assert rig.got == b"abcde"
        rig.connection.take_back()
        assert rig.got == b"abcdefgh"


async def test_an_answer_that_is_over_is_not_lent() -> None:
    async with streaming() as rig:
        rig.connection.data_received(b"0\r\n\r\n")
        assert rig.connection.lend(Borrower()) is None


async def test_a_connection_forgets_who_waited_for_a_chunk_of_its_last_answer() -> None:
    async with streaming() as rig:
        rig.connection.data_received(b"3\r\nc")
        rig.connection.before_chunk(b"never\r\n", rig.then)
        rig.connection.data_received(b"de\r\n0\r\n\r\n")
        rig.connection.release()
        rig.connection.data_received(b"never\r\n")
        await asyncio.sleep(0)
        assert rig.then_calls == 0


@pytest.mark.parametrize(("mark", "known"), [('"token_ids":[7]', True), ('"token_ids": [7]', False)])
def test_a_pattern_is_known_when_it_was_learnt(mark: str, known: bool) -> None:
    events = TokenEvents()
    assert not events.known
    events.learn(f'{{"choices":[{{{mark}}}]}}'.encode())
    assert events.known == known
