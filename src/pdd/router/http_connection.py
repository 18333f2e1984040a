"""One HTTP/1.1 connection to an engine: from the socket to a callback without a task switch.

It knows HTTP and the error tree, not engines, and not which connections there are.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from pdd.core.errors import ConnectionLostError, DeadlineError, PddError, RemoteProtocolError
from pdd.router.fastpath.lanes import Borrower, lendable_fd

TRAILER_TIMEOUT_S = 1.0
"""How long a stream whose last event has come may take for its final HTTP chunk before it is closed."""

_CHUNK_HEAD_BYTES = 10
"""Eight hexadecimal digits and the line's end; a server that writes more goes the long way."""

OnBytes = Callable[[bytes], bool]
"""Takes body bytes; true says that nothing more is wanted."""


class Gate:
    """Lets one reader hold back all connections that feed it; their engines' sockets fill up meanwhile."""

    def __init__(self) -> None:
        self.closed = False
        self._connections: set[Connection] = set()

    def add(self, connection: "Connection") -> None:
        """The connection obeys the gate from now on."""
        self._connections.add(connection)
        if self.closed:
            connection.pause()

    def discard(self, connection: "Connection") -> None:
        """The connection is free again."""
        self._connections.discard(connection)
        if self.closed:
            connection.resume()

    def close(self) -> None:
        """Nothing more is read."""
        self.closed = True
        for connection in self._connections:
            connection.pause()

    def open(self) -> None:
        """Reading goes on."""
        self.closed = False
        for connection in self._connections:
            connection.resume()


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time.

    Args:
        on_free: Told when an exchange is over and the connection can be used again.
        on_lost: Told when it is closed.
    """

    def __init__(
        self, *, on_free: "Callable[[Connection], None]", on_lost: "Callable[[Connection], None]"
    ) -> None:
        self.status = 0
        self.idle_since_s = 0.0
        self.used = False
        self.body = b""
        self._on_free = on_free
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._error: PddError | Exception | None = None
        self._lost = False
        self._in_exchange = False
        self._on_bytes: OnBytes | None = None
        self._parts: list[bytes] = []
        self._satisfied = False
        self._complete = False
        self._between_chunks = False
        self._keeps_alive = False
        self._paused = False
        self._idle_timeout_s = 0.0
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._borrower: Borrower | None = None
        self._chunk_end = b""
        self._at_chunk: Callable[[], None] | None = None
        self._held = b""

    # ---- for the pool

    @property
    def open(self) -> bool:
        """Whether a request may be sent."""
        return not self._lost and not self._in_exchange and not self._transport.is_closing()

    def send(self, request: bytes, on_bytes: OnBytes | None) -> None:
        """Begin an exchange."""
        self.status, self.body, self._error = 0, b"", None
        self._held, self._at_chunk = b"", None
        self._on_bytes, self._parts = on_bytes, []
        self._satisfied = self._complete = self._between_chunks = False
        self._in_exchange = True
        self._transport.write(request)

    async def head(self) -> int:
        """The status, once the headers are there."""
        while not self.status and self._error is None:
            await self._wait()
        if not self.status:
            assert self._error is not None
            raise self._taken_error()
        return self.status

    async def end(self, *, idle_timeout_s: float | None = None) -> None:
        """The answer is complete, or its reader wants no more of it.

        Raises:
            DeadlineError: If nothing comes for ``idle_timeout_s``; time in which reading is paused is free.
        """
        if idle_timeout_s is not None:
            self._idle_timeout_s, self._heard_s = idle_timeout_s, self._loop.time()
            self._timer = self._loop.call_later(idle_timeout_s, self._check_idle)
        try:
            while not (self._satisfied or self._complete) and self._error is None:
                await self._wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if self._error is not None and not self._satisfied:
            raise self._taken_error()
        self.body = b"".join(self._parts)

    @property
    def satisfied(self) -> bool:
        """Whether the reader has said that nothing more is wanted."""
        return self._satisfied

    def release(self) -> None:
        """The exchange is over for its owner: the connection is reused if the answer ends in order."""
        self._on_bytes = self._at_chunk = None
        if self._complete:
            self._free()
        elif self._satisfied and self._error is None:
            self._timer = self._loop.call_later(TRAILER_TIMEOUT_S, self.abort)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once, whatever is still to come."""
        self._transport.abort()

    def pause(self) -> None:
        """Read nothing more for now."""
        if not self._paused and not self._lost:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused and not self._lost:
            self._paused = False
            self._transport.resume_reading()

    # ---- for the fast path

    def before_chunk(self, chunk_end: bytes, then: Callable[[], None]) -> None:
        """Call ``then`` in another turn of the event loop, with the stream before a chunk of the body.

        If chunks that end so follow each other without a pause, what comes after the first of them is held
        back until ``lend`` or ``take_back``; one of the two has to be called.
        """
        if self._between_chunks:
            self._loop.call_soon(then)
        else:
            self._chunk_end, self._at_chunk = chunk_end, then

    def lend(self, borrower: Borrower) -> tuple[int, bytes] | None:
        """The socket, which is the borrower's to read until ``take_back``, and what was read from it already.

        None if that cannot be now. Errors and the end of the stream are not noticed meanwhile.
        """
        over = self._error or self._satisfied or self._complete
        in_order = not (self._parts or self._paused or over)
        fd = lendable_fd(self._transport) if self._between_chunks and in_order else None
        if fd is None:
            return None
        self._borrower = borrower
        self._transport.pause_reading()
        held, self._held = self._held, b""
        return fd, held

    def take_back(self, unread: bytes = b"") -> None:
        """The socket is read here again, beginning with what was read from it and not used."""
        if self._borrower is not None:
            self._heard_s = max(self._heard_s, self._borrower.heard_s())
            self._borrower = None
        unread, self._held = self._held + unread, b""
        if self._lost or self._transport.is_closing():
            return
        if not self._paused:
            self._transport.resume_reading()
        if unread:
            self.data_received(unread)

    def _hold(self, data: bytes) -> bytes:
        """What is to be parsed now, if somebody waits for the stream to stand before a chunk."""
        end = 0 if self._between_chunks else data.find(self._chunk_end) + len(self._chunk_end)
        if end < len(self._chunk_end) and not self._between_chunks:
            return data  # its end is not seen yet
        assert self._at_chunk is not None
        self._loop.call_soon(self._at_chunk)
        self._at_chunk = None
        self._held = data[end:]
        self._transport.pause_reading()
        return data[:end]

    def _free(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._in_exchange = False
        if self._lost or not self._keeps_alive:
            self.abort()
            return
        self.used = True
        self.idle_since_s = self._loop.time()
        self._on_free(self)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _taken_error(self) -> Exception:
        """The error, which the connection forgets: a raised one holds its frames, and they the connection."""
        assert self._error is not None
        error, self._error = self._error, None
        return error

    def _check_idle(self) -> None:
        now_s = self._loop.time()
        if self._paused:
            self._heard_s = now_s
        elif self._borrower is not None:
            self._heard_s = max(self._heard_s, self._borrower.heard_s())
        left_s = self._heard_s + self._idle_timeout_s - now_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_idle)
        else:
            self._fail(DeadlineError(f"nothing was heard for {self._idle_timeout_s:g} s"))

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came: parse them, and give the body to the reader at once."""
        self._heard_s = self._loop.time()
        if self._held:  # reading went on for another reason
            self._held += data
            return
        if self._at_chunk is not None:
            data = self._hold(data)
        try:
            if self._between_chunks and self._on_bytes is not None and (body := whole_chunk(data)):
                # Nearly always: the parser stands before a chunk, and would stand there again.
                self._parts.append(body)
            else:
                self._parser.feed_data(data)
            if self._on_bytes is not None and self._parts and self.status == 200:
                parts, self._parts = self._parts, []
                if not self._satisfied and self._error is None:
                    self._satisfied = self._on_bytes(parts[0] if len(parts) == 1 else b"".join(parts))
        except httptools.HttpParserError as error:
            self._fail(RemoteProtocolError(f"not HTTP: {error}"))
            self.abort()
        except Exception as error:  # noqa: BLE001  # the reader's: raised where the end is awaited
            self._fail(error)
        if self._complete or self._satisfied:
            self._wake()
            if self._complete and self._on_bytes is None and self._timer is not None:
                self._free()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._lost = True
        if self._in_exchange and not self._complete:
            self._fail(ConnectionLostError(f"the connection was closed: {exc or 'end of stream'}"))
        if self._timer is not None:
            self._timer.cancel()
        self._on_lost(self)
        del self._parser  # they refer to each other, and cycles are looked for seldom

    # ---- called by the parser

    def on_message_begin(self) -> None:
        """An answer begins."""
        if not self._in_exchange:
            self.abort()  # nobody asked

    def on_headers_complete(self) -> None:
        """The status is known."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._wake()

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._parts.append(body)

    def on_chunk_header(self) -> None:
        """A chunk of the body begins."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """It has ended."""
        self._between_chunks = self.status == 200

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._complete = self.status != 0
        self._keeps_alive = self._parser.should_keep_alive()


def whole_chunk(data: bytes) -> bytes:
    """The content of the one HTTP chunk that the bytes are; nothing if they are anything else."""
    head = data.find(b"\r\n", 0, _CHUNK_HEAD_BYTES)
    digits = data[:head]
    if head < 1 or not digits.isalnum() or data[-2:] != b"\r\n":
        return b""
    try:
        size = int(digits, 16)
    except ValueError:
        return b""
    return data[head + 2 : -2] if size == len(data) - head - 4 else b""
