"""Client of the parse process: answers go out as text, and come back as deltas, in order.

The router itself knows no parser. One connection carries all answers; it is made when the first one needs it.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from pdd.core.errors import (
    ConnectionLostError,
    DeadlineError,
    EngineError,
    NoEndpointError,
    PddError,
    RemoteProtocolError,
)
from pdd.wire.parsing import Close, Feed, Message, MessageBuffer, Open, Parsed, Whole, pack

MAX_UNPARSED = 64
"""Pieces of one answer on their way; with more, the answer waits."""

OnParsed = Callable[[Parsed], None]


class ParsedStream:
    """One answer at the parse process.

    Args:
        number: On this connection.
        send: Takes messages to the process.
        deadline_s: On the loop's clock: a process that hangs is waited for until then.
    """

    def __init__(self, number: int, send: Callable[[Message], None], *, deadline_s: float) -> None:
        self._number = number
        self._send = send
        self._deadline_s = deadline_s
        self._waiting: deque[OnParsed] = deque()
        self._changed = asyncio.Event()
        self.error: PddError | None = None

    def feed(self, text: str, ids: list[int], *, finished: bool, then: OnParsed) -> bool:
        """Send a piece; ``then`` is told what it means. False if ``ready`` should be awaited before more."""
        self._waiting.append(then)
        if self.error is None:
            self._send(Feed(self._number, text, ids, finished))
        return self.error is None and len(self._waiting) < MAX_UNPARSED

    async def whole(self, text: str, ids: list[int]) -> Parsed:
        """What a whole answer means.

        Raises:
            PddError: As ``ready``.
        """
        replies: list[Parsed] = []
        self._waiting.append(replies.append)
        if self.error is None:
            self._send(Whole(self._number, text, ids))
        await self.ready(below=1)
        return replies[0]

    async def ready(self, *, below: int = MAX_UNPARSED) -> None:
        """Fewer than ``below`` pieces are still on their way.

        Raises:
            EngineError: If the answer cannot be parsed.
            ConnectionLostError: If the process is gone.
            DeadlineError: If it has not answered by the deadline.
        """
        while self.error is None and len(self._waiting) >= below:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                self.fail(DeadlineError("the request did not finish in time (it was being parsed)"))
        if self.error is not None:
            raise self.error

    def take(self, reply: Parsed) -> None:
        """A reply came."""
        if reply.error is not None:
            self.fail(EngineError(500, f"the answer cannot be parsed: {reply.error}"))
            return
        then = self._waiting.popleft()
        if self.error is None:
            try:
                then(reply)
            except Exception as error:  # noqa: BLE001  # a bug of ours ends this answer, not all on the connection
                self.fail(PddError(f"internal error: {type(error).__name__}: {error}"))
        self._changed.set()

    def fail(self, error: PddError) -> None:
        """Nothing more comes."""
        if self.error is None:
            self.error = error
        self._changed.set()


class ParserClient(asyncio.Protocol):
    """All answers of this router at one parse process.

    Args:
        path: Its Unix socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = itertools.count()
        self._streams: dict[int, ParsedStream] = {}
        self._transport: asyncio.Transport | None = None
        self._connecting = asyncio.Lock()
        self._buffer = MessageBuffer()

    @asynccontextmanager
    async def answer(
        self, request: dict[str, Any], prompt_ids: list[int], *, deadline_s: float
    ) -> AsyncIterator[ParsedStream]:
        """An answer to a client's request, due by ``deadline_s``; it is forgotten when the context ends.

        Raises:
            NoEndpointError: If the process does not listen.
        """
        await self._connect()
        number = next(self._numbers)
        stream = self._streams[number] = ParsedStream(number, self._send, deadline_s=deadline_s)
        try:
            self._send(Open(number, request, prompt_ids))
            yield stream
        finally:
            self._streams.pop(number, None)
            self._send(Close(number))

    async def problem(self) -> str | None:
        """Why no answer could be parsed now; None if one could."""
        try:
            await self._connect()
        except NoEndpointError as error:
            return str(error)
        return None

    def close(self) -> None:
        """The connection is closed."""
        if self._transport is not None:
            self._transport.abort()

    async def _connect(self) -> None:
        async with self._connecting:
            if self._transport is not None:
                return
            try:
                loop = asyncio.get_running_loop()
                await loop.create_unix_connection(lambda: self, str(self._path))
            except OSError as error:
                why = error.strerror or error
                raise NoEndpointError(f"the parsers are not ready at {self._path}: {why}") from error

    def _send(self, message: Message) -> None:
        if self._transport is not None:
            self._transport.write(pack(message))

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process is there."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Replies came."""
        try:
            for message in self._buffer.feed(data):
                if isinstance(message, Parsed):
                    with contextlib.suppress(KeyError):  # an answer that has ended meanwhile
                        self._streams[message.stream].take(message)
        except RemoteProtocolError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The process is gone; the next answer looks for it again."""
        self._transport = None
        self._buffer = MessageBuffer()
        for stream in self._streams.values():
            stream.fail(ConnectionLostError(f"the parsers were lost: {exc or 'end of stream'}"))
