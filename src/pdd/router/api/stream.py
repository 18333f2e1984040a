"""One client's event stream: late headers, no long silence, errors after the first byte as events."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from pdd.core.errors import PddError
from pdd.router.api.errors import status_and_body
from pdd.router.sse import DONE, KEEP_ALIVE, frame


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
        self._lock = asyncio.Lock()
        self._wrote = False

    @property
    def begun(self) -> bool:
        """Whether the headers are out, so that an error has to be an event."""
        return self._response.prepared

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """While the context is open, silence is filled with comments."""
        if not self._interval_s:
            yield
            return
        task = asyncio.create_task(self._keep_alive())
        try:
            yield
        finally:
            task.cancel()

    async def send(self, payload: dict[str, Any]) -> None:
        """Send one event."""
        await self._write(frame(payload))

    async def finish(self) -> web.StreamResponse:
        """End a good stream."""
        await self._write(DONE)
        await self._response.write_eof()
        return self._response

    async def fail(self, error: PddError) -> web.StreamResponse:
        """End the stream with an error event and nothing after it: it cannot pass for a whole answer."""
        _, body = status_and_body(error)
        await self._write(frame(body))
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            self._wrote = True
            await self._response.write(data)

    async def _keep_alive(self) -> None:
        while True:
            self._wrote = False
            await asyncio.sleep(self._interval_s)
            if not self._wrote:
                try:
                    await self._write(KEEP_ALIVE)
                except (ConnectionError, RuntimeError):
                    return  # the client is gone; the handler hears of it itself
