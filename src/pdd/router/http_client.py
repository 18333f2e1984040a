"""HTTP/1.1 client of the path every token takes: requests over connections that are used again.

It knows HTTP and the error tree, not engines. Everything that is not on that path (agents, health pages of
the router itself) uses aiohttp.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from pdd.core.errors import ConnectError, ConnectionLostError
from pdd.router.http_connection import Connection, OnBytes

POOL_IDLE_S = 3.0
"""uvicorn closes idle connections after 5 s; ours must be gone before."""


class HttpClient:
    """Connections to one server.

    Args:
        url: Base URL, http or https.
        headers: Sent with every request.
        connect_timeout_s: A server that takes no connection within this is down.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._base = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        host = parts.netloc.rpartition("@")[2]
        self._head = header_lines({"Host": host, "Content-Type": "application/json", **headers})
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.abort()
        await asyncio.sleep(0)  # the event loop closes them in its next turn

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        *,
        body: Callable[[], bytes] = bytes,
        headers: Mapping[str, str] | None = None,
        on_bytes: OnBytes | None = None,
        pooled: bool = True,
    ) -> AsyncIterator[Connection]:
        """``begin``, and at the end of the context ``release`` or, if it is not pooled, ``abort``."""
        connection = await self.begin(
            method, path, body=body, headers=headers, on_bytes=on_bytes, pooled=pooled
        )
        try:
            yield connection
        finally:
            if pooled:
                connection.release()
            else:
                connection.abort()

    async def begin(
        self,
        method: str,
        path: str,
        *,
        body: Callable[[], bytes] = bytes,
        headers: Mapping[str, str] | None = None,
        on_bytes: OnBytes | None = None,
        pooled: bool = True,
    ) -> Connection:
        """An exchange whose headers are there; ``release`` it: early, that aborts it in the server.

        Args:
            method: Of HTTP.
            path: Below the base URL.
            body: Makes the JSON when it is sent; a stream would hold it to its end.
            headers: More headers.
            on_bytes: Reader of the body if the status is 200; without one, it is collected.
            pooled: Whether the connection may have been used before.

        Raises:
            ConnectError: If nobody answers at the address.
            ConnectionLostError: If the connection ends before the headers.
        """
        connection = (self._take() if pooled else None) or await self._connect()
        try:
            connection.send(self._request(method, path, body(), headers), on_bytes)
            try:
                await connection.head()
            except ConnectionLostError:
                if not connection.used:
                    raise
                # A pooled connection the server had just closed; not a byte of an answer came.
                connection = await self._connect()
                connection.send(self._request(method, path, body(), headers), on_bytes)
                await connection.head()
        except BaseException:
            connection.release()
            raise
        return connection

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None) -> bytes:
        return b"%b %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (
            method.encode(),
            (self._base + path).encode(),
            self._head,
            header_lines(headers) if headers else b"",
            len(body),
            body,
        )

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(on_free=self._rest, on_lost=self._forget),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                )
        except TimeoutError:
            raise ConnectError(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectError(str(error.strerror or error)) from error
        self._all.add(connection)
        return connection

    def _rest(self, connection: Connection) -> None:
        self._idle.append(connection)
        if self._sweep is None:
            self._close_rested()

    def _close_rested(self) -> None:
        """Close what rested too long, and come back for the one that has rested longest."""
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].idle_since_s + POOL_IDLE_S <= loop.time():
            self._idle.pop(0).abort()
        due_s = self._idle[0].idle_since_s + POOL_IDLE_S if self._idle else None
        self._sweep = None if due_s is None else loop.call_at(due_s, self._close_rested)

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


def header_lines(headers: Mapping[str, str]) -> bytes:
    """The headers as they are sent; one that would end its line early is left out."""
    return b"".join(
        f"{name}: {value}\r\n".encode("utf-8", "surrogateescape")
        for name, value in headers.items()
        if "\r" not in value and "\n" not in value
    )
