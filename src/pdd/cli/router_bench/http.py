"""A bare HTTP/1.1 server connection for the fakes: request in, bytes out, as little Python as possible."""

import asyncio
from typing import Any, Protocol, cast

import httptools
import msgspec

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Site(Protocol):
    """What answers."""

    def handle(self, connection: "ServerConnection", path: str, body: dict[str, Any]) -> None:
        """Answer a request, now or later."""

    def gone(self, connection: "ServerConnection") -> None:
        """The connection is closed."""


class ServerConnection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, site: Site) -> None:
        self.transport: asyncio.Transport
        self.writable = True
        self._site = site
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        del exc
        self.writable = False
        self._site.gone(self)

    def pause_writing(self) -> None:
        """Called by the event loop."""
        self.writable = False

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self.writable = True

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Called by the parser."""
        path = self._url.decode().partition("?")[0]
        self._site.handle(self, path, msgspec.json.decode(self._body) if self._body else {})

    def answer(self, body: object) -> None:
        """Send a whole JSON answer."""
        data = msgspec.json.encode(body)
        self.transport.write(JSON_HEAD % (len(data), data))
