"""Server-sent events: incremental parsing of what engines send, and framing of what clients get.

Parsing goes by lines over a buffer, never by HTTP chunk: proxies and kernels split and join chunks at will.
"""

from typing import Any

import msgspec

from pdd.core.errors import RemoteProtocolError

MAX_LINE_BYTES = 8 * 2**20
"""Bound on one event; the largest honest ones hold a few hundred log probabilities."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class LineBuffer:
    """Cuts a byte stream into lines, however it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by ``data``, without their line ends.

        Raises:
            RemoteProtocolError: If a line grows beyond any honest event.
        """
        if b"\n" not in data:
            self._buffer += data
            if len(self._buffer) > MAX_LINE_BYTES:
                raise RemoteProtocolError(f"event line longer than {MAX_LINE_BYTES} bytes")
            return []
        if self._buffer:
            data = bytes(self._buffer) + data
            self._buffer.clear()
        *lines, rest = data.split(b"\n")
        if rest:
            self._buffer += rest
        return [line.rstrip(b"\r") for line in lines] if b"\r" in data else lines


class EventParser:
    """Turns a byte stream into the ``data`` payloads of its events, one line each as vLLM writes them."""

    def __init__(self) -> None:
        self._lines = LineBuffer()
        self._between_lines = True

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by ``data``; comments and other fields are dropped."""
        if self._between_lines and data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2:
            payload = data[6:-2]
            if b"\n" not in payload:
                return [payload.strip()]  # one event as it was sent: nearly always
        self._between_lines = data.endswith(b"\n")
        return [line[5:].strip() for line in self._lines.feed(data) if line.startswith(b"data:")]


def frame(payload: dict[str, Any]) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
