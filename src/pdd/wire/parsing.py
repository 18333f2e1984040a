"""Messages between the router and the process that parses answers with vLLM's parsers, over one Unix socket.

The router sends the text of an answer as it joins it; every ``Feed`` and ``Whole`` gets one ``Parsed``, in
order.
A message is a 4-byte little-endian length and that many bytes of msgpack, tagged by type.
"""

import struct
from typing import Any, Final

import msgspec

from pdd.core.errors import LocalProtocolError, RemoteProtocolError

MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""Bound on one message: the request of a client with its prompt's token ids."""
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of all messages."""


class Open(_Message, frozen=True, tag="open"):
    """An answer begins; ``stream`` is its number on this connection, ``request`` the client's body."""

    stream: int
    request: dict[str, Any]
    prompt_ids: list[int]


class Feed(_Message, frozen=True, tag="feed"):
    """The next piece of a streamed answer."""

    stream: int
    text: str
    ids: list[int]
    finished: bool


class Whole(_Message, frozen=True, tag="whole"):
    """The whole text of an opened answer that is not streamed."""

    stream: int
    text: str
    ids: list[int]


class Close(_Message, frozen=True, tag="close"):
    """Nothing more comes of an answer."""

    stream: int


class Parsed(_Message, frozen=True, tag="parsed"):
    """What a piece means: fields of a delta, or of a whole message; None if there is nothing to say yet.

    ``reasoning_tokens`` comes with the last piece. With ``error`` the answer cannot be parsed.
    """

    stream: int
    fields: dict[str, Any] | None = None
    reasoning_tokens: int | None = None
    error: str | None = None


Message = Open | Feed | Whole | Close | Parsed
_decode = msgspec.msgpack.Decoder(Message).decode
_encode = msgspec.msgpack.Encoder().encode


def pack(message: Message) -> bytes:
    """The message as it is sent.

    Raises:
        LocalProtocolError: If it is larger than the other side takes: it would end all answers for one.
    """
    payload = _encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"a message of {len(payload)} bytes to the parsers")
    return _LENGTH.pack(len(payload)) + payload


class MessageBuffer:
    """Cuts a byte stream into messages, however it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by ``data``.

        Raises:
            RemoteProtocolError: If the other side does not speak this protocol.
        """
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES:
                raise RemoteProtocolError(f"a message of {length} bytes")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                messages.append(_decode(memoryview(self._buffer)[start + _LENGTH.size : end]))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise RemoteProtocolError(f"not a message: {error}") from error
            start = end
        del self._buffer[:start]
        return messages
