"""One client's event stream: late headers, no long silence, errors after the first byte as events."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from aiohttp import web

from pdd.core.errors import PddError
from pdd.router.api.errors import status_and_body
from pdd.router.fastpath.lanes import Borrower, lendable_fd
from pdd.router.sse import DONE, KEEP_ALIVE, frame

MAX_UNSENT_BYTES = 256 * 2**10
"""Of one stream, in this process; the kernel holds as much again."""
SLOW_CLIENT_POLL_S = 0.02


class ClientStream:
    """Writes server-sent events.

    The headers wait for the first event (or for the first keep-alive comment), so that whatever fails
    before it is an ordinary HTTP error with its status.

    Args:
        request: The client's request.
        headers: Sent with the first byte.
        keep_alive_interval_s: Longest silence on the wire; 0 allows any.
    """

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], *, keep_alive_interval_s: float
    ) -> None:
        self._request = request
        self._interval_s = keep_alive_interval_s
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._pending: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = False
        self._wrote = False
        self._borrower: Borrower | None = None
        self._next_look: asyncio.TimerHandle
        self._comment: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether the headers are out, so that an error has to be an event."""
        return self._response.prepared

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """While the context is open, silence is filled with comments."""
        if not self._interval_s:
            yield
            return
        self._look_later()
        try:
            yield
        finally:
            self._next_look.cancel()
            if self._comment is not None:
                self._comment.cancel()

    def write(self, data: bytes) -> bool:
        """Send event bytes without waiting; false asks for ``ready`` to be awaited before many more."""
        self._wrote = True
        transport = self._transport
        if transport is None or self._pending or transport.is_closing():
            self._pending.append(data)
            return False
        # Past aiohttp, which needs a coroutine for each write: it has sent the headers, it will send the end.
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() <= MAX_UNSENT_BYTES

    def write_event(self, before: bytes, text: bytes, after: bytes) -> bool:
        """``write`` of three parts, in one copy: the way of nearly every token."""
        transport = self._transport
        if transport is None or self._pending or not self._chunked or transport.is_closing():
            return self.write(before + text + after)
        self._wrote = True
        transport.write(b"%x\r\n%b%b%b\r\n" % (len(before) + len(text) + len(after), before, text, after))
        return transport.get_write_buffer_size() <= MAX_UNSENT_BYTES

    async def ready(self) -> None:
        """All that was written is on its way, and no more than a little of it waits for the client.

        Raises:
            ConnectionResetError: If the client is gone.
        """
        async with self._lock:
            transport = self._transport or await self._begin()
            pending, self._pending = self._pending, []
            if transport.is_closing():
                raise ConnectionResetError("the client closed the connection")
            for data in pending:
                self.write(data)
            while transport.get_write_buffer_size() > MAX_UNSENT_BYTES // 2:
                await asyncio.sleep(SLOW_CLIENT_POLL_S)
                if transport.is_closing():
                    raise ConnectionResetError("the client closed the connection")

    # ---- for the fast path

    def lend(self, borrower: Borrower) -> int | None:
        """The socket, which is the borrower's to write until ``take_back``; None if that cannot be now."""
        if self._transport is None or self._pending or not self._chunked:
            return None
        fd = lendable_fd(self._transport)
        self._borrower = None if fd is None else borrower
        return fd

    def take_back(self, unsent: bytes) -> bool:
        """The socket is written here again, beginning with bytes that are framed already."""
        self._borrower = None
        self._wrote = True  # perhaps a moment ago
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if unsent:
            transport.write(unsent)
        return transport.get_write_buffer_size() <= MAX_UNSENT_BYTES

    async def finish(self) -> web.StreamResponse:
        """End a good stream."""
        await self.ready()
        await self._response.write_eof(DONE)
        return self._response

    async def fail(self, error: PddError) -> web.StreamResponse:
        """End the stream with an error event and nothing after it: it cannot pass for a whole answer."""
        _, body = status_and_body(error)
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > MAX_UNSENT_BYTES // 2:
            transport.abort()  # a client that takes nothing would not take the event either
            return self._response
        await self.ready()
        await self._response.write_eof(frame(body))
        return self._response

    async def _begin(self) -> asyncio.WriteTransport:
        """The headers are out, in one segment with what was written so far."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client closed the connection")
        await self._response.prepare(self._request)
        pending, self._pending = self._pending, []
        if pending:
            await self._response.write(b"".join(pending))
        self._chunked = self._response.headers.get("Transfer-Encoding") == "chunked"
        self._transport = transport
        return transport

    def _look_later(self) -> None:
        """A timer and no task: hardly any stream is ever silent for so long."""
        self._wrote = False
        self._next_look = self._loop.call_later(self._interval_s, self._look)

    def _look(self) -> None:
        borrower = self._borrower
        if borrower is not None and borrower.heard_s() <= self._loop.time() - self._interval_s:
            borrower.take_back()
            self._wrote = False
        is_silent = not self._wrote and self._borrower is None
        if is_silent and (self._comment is None or self._comment.done()):
            self.write(KEEP_ALIVE)
            self._comment = asyncio.create_task(self._send_comment())
        self._look_later()

    async def _send_comment(self) -> None:
        with suppress(ConnectionError, RuntimeError):  # the client is gone; the handler hears of it itself
            await self.ready()
