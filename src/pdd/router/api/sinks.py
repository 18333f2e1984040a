"""Where the pieces of answers go: collected, streamed, or through the parse process."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdd.core.errors import PddError
from pdd.router.api.shapes import Choice, Shape
from pdd.router.api.stream import ClientStream
from pdd.router.parsing import ParsedStream
from pdd.router.request.answer import ClientEnd, Piece, Sink
from pdd.router.request.driver import RequestDriver
from pdd.router.sse import frame
from pdd.wire.parsing import Parsed

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One choice and what computes it."""

    choice: Choice
    driver: RequestDriver

    def note(self, piece: Piece) -> None:
        """The choice knows how far it is."""
        self.choice.num_tokens = piece.num_tokens
        self.choice.cached_tokens = self.driver.record.cached_tokens
        if piece.finish is not None:
            self.choice.finish, self.choice.stop_reason = piece.finish, piece.stop_reason


class Collected:
    """Sink of an answer that is sent as a whole."""

    def __init__(self, run: Run, *, text_only: bool) -> None:
        self._run = run
        self.text_only = text_only
        self.client: ClientEnd | None = None

    def put(self, piece: Piece) -> bool:
        """Keep the piece."""
        self._run.choice.text += piece.text
        self._run.choice.tokens.extend(piece.tokens)
        self._run.note(piece)
        return True

    def put_text(self, text: str, num_tokens: int) -> bool:
        """Keep the text."""
        self._run.choice.text += text
        self._run.choice.num_tokens = num_tokens
        return True

    async def ready(self) -> None:
        """Always."""


class Streamed:
    """Sink of one choice of a streamed answer."""

    def __init__(self, run: Run, stream: ClientStream, shape: Shape, *, continuous: bool) -> None:
        self._run = run
        self._choice = run.choice
        self._stream = stream
        self._shape = shape
        self._continuous = continuous
        around = None if continuous else shape.around_text(run.choice)
        self.text_only = around is not None
        self._before, self._after = around or (b"", b"")
        self.client: ClientEnd | None = None
        self.tells_tokens = shape.token_ids or shape.logprobs is not None
        self.ready = stream.ready

    def put(self, piece: Piece) -> bool:
        """Write the piece's event."""
        self.begin()
        self._run.note(piece)
        return self.write(piece, self._shape.content(piece))

    def put_text(self, text: str, num_tokens: int) -> bool:
        """Write the event of a piece of text; something was put before it."""
        self._choice.num_tokens = num_tokens
        return self._stream.write_event(self._before, _encode(text), self._after)

    def have_alone(self) -> None:
        """No other choice goes to the stream, which can be lent therefore."""
        if self.text_only:
            self.client = ClientEnd(socket=self._stream, around=(self._before + b'"', b'"' + self._after))

    def begin(self) -> None:
        """What comes before the first token is written."""
        choice = self._choice
        if choice.begun:
            return
        choice.begun = True
        if (first := self._shape.first_chunk(choice)) is not None:
            self._stream.write(self._frame(first))
        choice.text_chars = len(choice.echo_text)

    def write(self, piece: Piece, content: dict[str, Any]) -> bool:
        """Write one event."""
        data = self._frame(self._shape.chunk(self._choice, piece, content))
        self._choice.text_chars += len(piece.text)
        return self._stream.write(data)

    def _frame(self, payload: dict[str, Any]) -> bytes:
        if self._continuous:
            payload["usage"] = self._shape.usage([self._run.choice], details=False)
        return frame(payload)


class ParsedSink:
    """Sink of one choice of a streamed answer whose text the parse process turns into deltas.

    Args:
        run: The choice.
        inner: Writes the events.
        parsed: The answer at the parse process.
        named_tool: The client named the function to call, which leaves the finish reason as it is.
        bare: Log probabilities and token IDs would show hidden reasoning: they are left out.
    """

    text_only = False
    client: ClientEnd | None = None

    def __init__(
        self, run: Run, inner: Streamed, parsed: ParsedStream, *, named_tool: bool, bare: bool
    ) -> None:
        self._run = run
        self._inner = inner
        self._parsed = parsed
        self._named_tool = named_tool
        self._bare = bare
        self._called = False
        self._is_taken = True

    def put(self, piece: Piece) -> bool:
        """Send the piece; its event is written when it comes back."""
        is_first = not self._run.choice.begun
        self._inner.begin()
        self._run.note(piece)
        ids = [token.id for token in piece.tokens]
        go_on = self._parsed.feed(
            piece.text, ids, finished=piece.finish is not None, then=lambda reply: self._write(piece, reply)
        )
        return go_on and self._is_taken and not is_first  # the headers wait for ``ready``

    def put_text(self, text: str, num_tokens: int) -> bool:
        """Never asked for: parsers want token IDs."""
        raise NotImplementedError

    async def ready(self) -> None:
        """The client has taken what was parsed, and not too much is on its way."""
        await self._parsed.ready()
        await self._inner.ready()
        self._is_taken = True

    async def finish(self) -> None:
        """All pieces have come back."""
        await self._parsed.ready(below=1)

    def _write(self, piece: Piece, reply: Parsed) -> None:
        choice, delta = self._run.choice, reply.fields
        if reply.reasoning_tokens is not None:
            choice.reasoning_tokens = reply.reasoning_tokens
        if delta is not None and delta.get("tool_calls"):
            self._called = True
        if self._bare:
            piece = msgspec.structs.replace(piece, tokens=())
        if piece.finish == "stop" and self._called and not self._named_tool:
            piece = msgspec.structs.replace(piece, finish="tool_calls")
            choice.finish = "tool_calls"
        if delta or piece.finish is not None or (piece.tokens and self._inner.tells_tokens):
            self._is_taken = self._inner.write(piece, {"delta": delta or {}})


async def run_all(runs: Sequence[tuple[Run, Sink]]) -> None:
    """Run every choice; the first that fails ends the others."""
    if len(runs) == 1:
        run, sink = runs[0]
        await run.driver.run(sink)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for run, sink in runs:
                group.create_task(run.driver.run(sink))
    except* (PddError, ConnectionError) as errors:  # the latter: the client is gone
        raise errors.exceptions[0] from None
