"""Server-sent events: incremental parsing of what engines send, and framing of what clients get.

Parsing goes by lines over a buffer, never by HTTP chunk: proxies and kernels split and join chunks at will.
"""

from typing import Any

import msgspec

from pdd.core.errors import RemoteProtocolError

MAX_LINE_BYTES = 8 * 2**20
"""Bound on one event; the largest honest ones hold a few hundred log probabilities."""

_ID_DIGITS = 9

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
        self.between_events = True

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by ``data``; comments and other fields are dropped."""
        if self.between_events and data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2:
            payload = data[6:-2]
            if b"\n" not in payload:
                return [payload.strip()]  # one event as it was sent: nearly always
        self.between_events = data.endswith(b"\n")
        return [line[5:].strip() for line in self._lines.feed(data) if line.startswith(b"data:")]


class TokenEvents:
    """Reads the tokens of an event that is like the one before it, without parsing JSON.

    An engine's events in the middle of an answer differ in nothing but the tokens' IDs. ``around`` is what
    surrounds those, once it is ``known``.
    """

    _MARK = b'"token_ids":['

    def __init__(self) -> None:
        self.around = (b"\0", b"\0")
        self.known = False
        self._start = self._end = 0

    def learn(self, payload: bytes) -> None:
        """An event that held tokens and nothing else is the pattern from now on."""
        data = b"data: " + payload + b"\n\n"
        start = data.find(self._MARK) + len(self._MARK)
        end = data.find(b"]", start)
        if start >= len(self._MARK) and _ids(data[start:end]):
            self.around, self.known = (data[:start], data[end:]), True
            self._start, self._end = start, end - len(data)

    def read(self, data: bytes) -> list[int]:
        """The tokens' IDs; none if the event is not of the pattern."""
        before, after = self.around
        if data.startswith(before) and data.endswith(after):
            return _ids(data[self._start : self._end])
        return []


def _ids(digits: bytes) -> list[int]:
    """The numbers of ``12,7,1999``; none if it is anything else."""
    if digits.isdigit() and len(digits) <= _ID_DIGITS:
        return [int(digits)]  # nearly always
    parts = digits.split(b",")
    return [int(part) for part in parts] if all(p.isdigit() and len(p) <= _ID_DIGITS for p in parts) else []


def frame(payload: dict[str, Any]) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
