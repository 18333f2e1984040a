"""One answer's tokens on their way to the client: as text, each token once and in order.

It knows no client protocol: whoever the answer is for gets pieces of it.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from pdd.router.detokenize import Detokenizer
from pdd.router.fastpath.lanes import Borrower, News
from pdd.router.request.accounting import Accounting
from pdd.router.request.events import Token

Role = Literal["relay", "main"]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the answer, ready for the client.

    Args:
        text: New text; may be empty while a character or a possible stop string is incomplete.
        tokens: New tokens, each with the engine's log probabilities.
        num_tokens: Tokens of the answer so far, these included.
        finish: Set on the last piece.
        stop_reason: The stop string or token that ended the answer, if one did.
    """

    text: str
    tokens: tuple[Token, ...]
    num_tokens: int
    finish: str | None
    stop_reason: int | str | None


class ClientSocket(Protocol):
    """A client's stream that can be lent."""

    def lend(self, borrower: Borrower) -> int | None:
        """The socket, which is the borrower's to write until ``take_back``; None if that cannot be now."""

    def take_back(self, unsent: bytes) -> bool:
        """Bytes are written here again, beginning with these; false asks for ``ready`` to be awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientEnd:
    """A client's stream whose events differ in nothing but text, and what is around that."""

    socket: ClientSocket
    around: tuple[bytes, bytes]


class Sink(Protocol):
    """Where an answer goes; a slow one holds the engines back.

    ``text_only`` says that pieces without finish need no more than their text. ``client`` is the stream they
    go to, if it can be lent.
    """

    text_only: bool
    client: ClientEnd | None

    def put_text(self, text: str, num_tokens: int) -> bool:
        """Take the text of a piece in the middle of the answer, as ``put`` would."""

    def put(self, piece: Piece) -> bool:
        """Take a piece without waiting; false asks for ``ready`` to be awaited before there are many more."""

    async def ready(self) -> None:
        """The client has taken so much that pieces are welcome again."""


class Answer:
    """What was given to the client so far, and what waits to be.

    Args:
        text: Makes the text; it has seen the prompt.
        accounting: Told of every token.
        sink: Takes the pieces.
        has_stops: Whether the text is looked through for stop strings.
    """

    def __init__(self, *, text: Detokenizer, accounting: Accounting, sink: Sink, has_stops: bool) -> None:
        self.num_tokens = 0
        self.text_only = sink.text_only and not has_stops
        self.client = sink.client if self.text_only else None
        self._text = text
        self._accounting = accounting
        self._sink = sink
        self._pieces: list[Piece] = []

    def give(
        self,
        tokens: tuple[Token, ...],
        role: str,
        finish: str | None,
        stop_reason: int | str | None,
        *,
        now_s: float,
    ) -> str | None:
        """Make a piece of the tokens; returns how the answer ended, which a stop string may decide."""
        for taken, token in enumerate(tokens, 1):
            stop = self._text.feed(token.id, ends_as_stop_token=finish == "stop" and taken == len(tokens))
            if stop is not None:
                tokens, finish, stop_reason = tokens[:taken], "stop", stop.stop
                break
        self.num_tokens += len(tokens)
        self._accounting.on_tokens(now_s, len(tokens), role)
        self._pieces.append(
            Piece(
                text=self._text.take(finished=finish is not None),
                tokens=tokens,
                num_tokens=self.num_tokens,
                finish=finish,
                stop_reason=stop_reason,
            )
        )
        return finish

    def pass_on(self, ids: list[int], role: Role, *, now_s: float) -> bool:
        """Give tokens, nothing but more text, at once; false asks for ``ready`` to be awaited."""
        text = self._text.more(ids)
        self.num_tokens += len(ids)
        if not self._accounting.on_more(now_s, len(ids), role):
            self._accounting.on_tokens(now_s, len(ids), role)
        return self._sink.put_text(text, self.num_tokens)

    # ---- while somebody else gives tokens to the client

    def can_be_lent(self, role: Role) -> bool:
        """Whether the role's next token is nothing but more text, and no character is half written."""
        return not self._pieces and self._text.is_at_boundary and self._accounting.is_steady(role)

    @property
    def last_token_s(self) -> float:
        """When the last token was given, on the loop's clock."""
        return self._accounting.last_token_s

    def note_given(self, news: News) -> None:
        """Tokens were given to the client."""
        self.num_tokens += len(news.ids)
        self._accounting.on_given(news)

    def go_on(self, tail: list[int], *, held: int, new_tokens: int) -> None:
        """Go on after ``tail``: ``new_tokens`` came, of which the last ``held`` have given no text yet."""
        self._text.resume(tail, held=held, new_tokens=new_tokens)

    def hand_out(self) -> bool:
        """Give the client all there is; false asks for ``ready`` to be awaited."""
        pieces, self._pieces = self._pieces, []
        is_welcome = True
        for piece in pieces:
            is_welcome = self._sink.put(piece)
        return is_welcome

    async def ready(self) -> None:
        """The client has taken so much that pieces are welcome again."""
        await self._sink.ready()
