"""The parsers behind a Unix socket: every message is answered at once, in order."""

import asyncio
import logging
from typing import Protocol, cast

from pdd.core.errors import RemoteProtocolError
from pdd.wire.parsing import Close, Feed, Message, MessageBuffer, Open, Parsed, Whole, pack

log = logging.getLogger(__name__)


class Answer(Protocol):
    """One answer that is being parsed."""

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens so far were reasoning."""

    def feed(self, text: str, ids: list[int], *, finished: bool) -> dict[str, object] | None:
        """The delta that the piece adds."""

    def whole(self, text: str, ids: list[int]) -> dict[str, object]:
        """The whole message."""


class Opener(Protocol):
    """What makes answers."""

    def open(self, request: dict[str, object], prompt_ids: list[int]) -> Answer:
        """A new answer to a client's request."""


class ParseConnection(asyncio.Protocol):
    """One router's connection; its answers end with it."""

    def __init__(self, parsers: Opener) -> None:
        self._parsers = parsers
        self._buffer = MessageBuffer()
        self._answers: dict[int, Answer | str] = {}
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A router is there."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Messages came; their replies leave together."""
        try:
            messages = self._buffer.feed(data)
        except RemoteProtocolError as error:
            log.error("a connection is closed: %s", error)
            self._transport.abort()
            return
        replies = [reply for message in messages if (reply := self._answer(message)) is not None]
        if replies:
            self._transport.write(b"".join(replies))

    def _answer(self, message: Message) -> bytes | None:
        match message:
            case Open():
                self._answers[message.stream] = self._open(message)
            case Close():
                self._answers.pop(message.stream, None)
            case Feed() | Whole():
                return self._parse(message)
            case _:
                pass
        return None

    def _open(self, message: Open) -> Answer | str:
        try:
            return self._parsers.open(message.request, message.prompt_ids)
        except Exception as error:  # a parser's bug ends one answer, not the process
            log.exception("an answer cannot be parsed")
            return said(error)

    def _parse(self, message: Feed | Whole) -> bytes:
        answer = self._answers.get(message.stream, "the answer was not opened")
        if isinstance(answer, str):
            return pack(Parsed(message.stream, error=answer))
        try:
            if isinstance(message, Whole):
                fields: dict[str, object] | None = answer.whole(message.text, message.ids)
            else:
                fields = answer.feed(message.text, message.ids, finished=message.finished)
            is_last = isinstance(message, Whole) or message.finished
            # Packed here, since what a parser gives may be what no message can hold.
            return pack(Parsed(message.stream, fields, answer.reasoning_tokens if is_last else None))
        except Exception as error:
            log.exception("an answer cannot be parsed")
            self._answers[message.stream] = text = said(error)
            return pack(Parsed(message.stream, error=text))


def said(error: Exception) -> str:
    """What an error says, in characters that a message can hold."""
    return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
