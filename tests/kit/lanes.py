"""Lanes of the fast path between sockets of our own, and what has to come out of them."""

import array
import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import msgspec
from tests.kit.fast_text import FastText
from tests.kit.tokenizer import WORD_PIECES, pieces_tokenizer

from pdd.router.fastpath.lanes import Ends, FastPath, News
from pdd.router.fastpath.vocabulary import Vocabulary, vocabulary_of

TOKENIZER = pieces_tokenizer()
ENGINE_AROUND = (b'data: {"id":"r1","choices":[{"token_ids":[', b"]}]}\n\n")
CLIENT_AROUND = (b'data: {"id":"c","choices":[{"text":"', b'"}]}\n\n')


def _table() -> Vocabulary:
    vocabulary = vocabulary_of(TOKENIZER)
    assert vocabulary is not None
    return vocabulary


VOCABULARY = _table()
NUM_IDS = len(VOCABULARY.offsets) - 1

Chunks = list[tuple[bytes, Sequence[int] | None]]
"""An engine's, each with the tokens that it holds if it is an event like the others."""


def is_told(token_id: int) -> bool:
    """Whether the table has the token's text."""
    return VOCABULARY.offsets[token_id] < VOCABULARY.offsets[token_id + 1]


def chunk(content: bytes) -> bytes:
    """An HTTP chunk as engines and the router write it."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def event(ids: Sequence[int], around: tuple[bytes, bytes] = ENGINE_AROUND) -> bytes:
    """The content of an engine's event of these tokens."""
    return around[0] + ",".join(map(str, ids)).encode() + around[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a lane has to do with the beginning of a stream.

    Args:
        ids: Tokens it takes.
        held: How many of the last ones have given no text.
        engine: Bytes of the chunks that it takes.
        client: What the client gets for them.
    """

    ids: list[int]
    held: int
    engine: bytes
    client: bytes


def told(chunks: Chunks, *, room: int = 2**31) -> Told:
    """What a lane has to do that may take so many tokens, by the rule in Python."""
    text, taken, engine, client = FastText(VOCABULARY), [], bytearray(), bytearray()
    held = 0
    for data, ids in chunks:
        parts = [] if ids is None or len(taken) + len(ids) > room else [text.take(i) for i in ids]
        if not parts or None in parts:
            break
        taken += ids or ()
        held = text.held
        engine += data
        escaped = msgspec.json.encode("".join(part or "" for part in parts))[1:-1]
        client += chunk(CLIENT_AROUND[0] + escaped + CLIENT_AROUND[1])
    return Told(ids=taken, held=held, engine=bytes(engine), client=bytes(client))


def told_of(ids: Iterable[int]) -> Told:
    """What a lane has to do with an event for each token."""
    return told([(chunk(event([i])), [i]) for i in ids])


def hellos(num_tokens: int) -> list[int]:
    """Tokens that are whole words, not all the same."""
    return [i % len(WORD_PIECES) for i in range(num_tokens)]


def steady(ids: Iterable[int]) -> bytes:
    """A stream with an event for each token."""
    return b"".join(chunk(event([i])) for i in ids)


class Wire:
    """One TCP connection over loopback.

    Args:
        buffer_bytes: Of the kernel, on either side; its own choice if none.

    ``ours`` is the router's side, ``theirs`` the engine's or the client's.
    """

    def __init__(self, buffer_bytes: int | None = None) -> None:
        with socket.socket() as server, socket.socket() as theirs:
            if buffer_bytes is not None:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            server.bind(("127.0.0.1", 0))
            server.listen()
            theirs.connect(server.getsockname())
            self.ours, _ = server.accept()
            self.theirs = theirs.dup()
        for end in (self.ours, self.theirs):
            end.setblocking(False)  # noqa: FBT003  # its only parameter
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if buffer_bytes is not None:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)

    def buffer_bytes(self) -> int:
        """What the kernel may hold on the way in one direction, with its own bookkeeping."""
        return sum(
            end.getsockopt(socket.SOL_SOCKET, option)
            for end in (self.ours, self.theirs)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF)
        )

    def reset(self) -> None:
        """Their side is closed at once, as by a process that dies."""
        self.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.theirs.close()

    def close(self) -> None:
        """Both sides are closed."""
        self.ours.close()
        self.theirs.close()


def unread_bytes(sock: socket.socket) -> int:
    """How many bytes wait in a socket to be read."""
    count = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, count)
    return count[0]


async def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """So many bytes from the socket, less only if the connection ends."""
    got = bytearray()
    loop = asyncio.get_running_loop()
    while len(got) < num_bytes and (data := await loop.sock_recv(sock, min(num_bytes - len(got), 2**16))):
        got += data
    return bytes(got)


async def write(sock: socket.socket, data: bytes) -> None:
    """Everything is sent."""
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def write_and_shut(sock: socket.socket, data: bytes, *, piece_bytes: int) -> None:
    """Everything is sent, piece by piece, and the stream ends."""
    for begin in range(0, len(data), piece_bytes):
        await write(sock, data[begin : begin + piece_bytes])
        await asyncio.sleep(0)
    sock.shutdown(socket.SHUT_WR)


async def rest_of(sock: socket.socket) -> bytes:
    """Everything until the connection ends."""
    return await receive(sock, 2**40)


@dataclass(slots=True, kw_only=True)
class Lane:
    """A lane, its borrower, and the four ends of its two connections."""

    path: FastPath
    engine: Wire
    client: Wire
    number: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    num_taken_back: int = 0
    ids: list[int] = field(default_factory=list)
    news: News | None = None
    when_over: Callable[[], None] = lambda: None

    # ---- the borrower

    def heard_s(self) -> float:
        """Nobody asks in these tests."""
        raise NotImplementedError

    def note(self, news: News) -> None:
        """Tokens were given to the client."""
        self.ids += news.ids

    def take_back(self) -> None:
        """The lane is over, and ``news`` says how."""
        self.num_taken_back += 1
        if self.news is None:
            self.news = self.path.stop(self.number)
            self.note(self.news)
            self.over.set()
            self.when_over()

    # ---- for tests

    def ends(
        self,
        *,
        unread: bytes = b"",
        engine_around: tuple[bytes, bytes] = ENGINE_AROUND,
        client_around: tuple[bytes, bytes] = CLIENT_AROUND,
        room: int = 2**31,
    ) -> Ends:
        """What is lent of the connections."""
        return Ends(
            engine_fd=self.engine.ours.fileno(),
            unread=unread,
            engine_around=engine_around,
            client_fd=self.client.ours.fileno(),
            client_around=client_around,
            room=room,
            last_s=0.0,
        )

    def begin(self, ends: Ends) -> None:
        """The lane runs, perhaps once more."""
        number = self.path.lend(ends, self)
        assert number is not None
        self.number, self.news = number, None
        self.over.clear()

    def stop(self) -> News:
        """What the lane left, taken back now if it had not ended."""
        if self.news is None:
            self.take_back()
        assert self.news is not None
        return self.news

    async def ended(self) -> News:
        """What the lane left when it ended by itself."""
        await self.over.wait()
        assert self.news is not None
        return self.news

    async def caught_up(self) -> None:
        """The lane has read everything that the engine has sent, or has ended."""
        while self.news is None and unread_bytes(self.engine.ours):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)

    async def check(self, stream: bytes, expected: Told, *, got: bytes = b"") -> None:
        """The lane took what it should, and nothing of either stream is lost, doubled or in another order.

        Args:
            stream: All that the engine has sent; its side is shut by now.
            expected: What the lane should have taken.
            got: What the client has read already.
        """
        news = self.stop()
        assert self.ids == expected.ids
        assert news.held == expected.held
        rest, more, _ = await asyncio.gather(
            rest_of(self.engine.ours), rest_of(self.client.theirs), self._send_unsent(news.unsent)
        )
        assert news.unread + rest == stream[len(expected.engine) :]
        assert got + more == expected.client

    async def _send_unsent(self, unsent: bytes) -> None:
        await write(self.client.ours, unsent)
        self.client.ours.shutdown(socket.SHUT_WR)


@contextmanager
def lane(
    path: FastPath,
    *,
    unread: bytes = b"",
    room: int = 2**31,
    engine_buffer_bytes: int | None = None,
    client_buffer_bytes: int | None = None,
) -> Iterator[Lane]:
    """A lane that has begun; whatever becomes of it, its sockets are closed in the end."""
    made = Lane(path=path, engine=Wire(engine_buffer_bytes), client=Wire(client_buffer_bytes))
    try:
        made.begin(made.ends(unread=unread, room=room))
        yield made
        made.stop()
    finally:
        made.engine.close()
        made.client.close()


@asynccontextmanager
async def fast_path() -> AsyncIterator[FastPath]:
    """The thread, with the table of ``TOKENIZER``."""
    path = FastPath(VOCABULARY)
    path.start()
    try:
        yield path
    finally:
        path.close()
