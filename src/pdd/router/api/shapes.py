"""The JSON of answers: chunks of a stream and whole answers, for chat and for completions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pdd.router.api.logprobs import LogprobFormat
from pdd.router.request.answer import Piece
from pdd.router.request.events import Token
from pdd.router.sse import frame

_TEXT = "\0text\0"
"""Stands for the text of a piece; no id or model name holds it."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer as it grows; ``text`` and ``tokens`` are collected only when it is not streamed."""

    index: int
    prompt_ids: Sequence[int]
    echo_text: str = ""
    text: str = ""
    text_chars: int = 0
    tokens: list[Token] = field(default_factory=list)
    num_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None
    stop_reason: int | str | None = None
    begun: bool = False
    prompt_logprobs: list[Any] | None = None
    parsed: dict[str, Any] | None = None
    reasoning_tokens: int | None = None

    def take_parsed(self, message: dict[str, Any], reasoning_tokens: int | None, tool_choice: Any) -> None:
        """Keep what the parsers found in the whole text, and let the finish reason say so, as vLLM does."""
        self.parsed, self.reasoning_tokens = message, reasoning_tokens
        called = bool(message.get("tool_calls")) and tool_choice in (None, "auto")
        if called or (tool_choice == "required" and self.finish == "stop"):
            self.finish = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Writes one request's answers.

    Args:
        api: Which endpoint.
        id: ``chatcmpl-…`` or ``cmpl-…``.
        model: As the client named it.
        logprobs: How to write log probabilities; None if they were not asked for.
        token_ids: Also write token IDs.
    """

    api: Literal["chat", "completion"]
    id: str
    model: str
    logprobs: LogprobFormat | None
    token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        """What comes before the first token: the role, or the echoed prompt."""
        ids = {"prompt_token_ids": list(choice.prompt_ids)} if self.token_ids else {}
        if self.api == "chat":
            delta = {"role": "assistant", "content": ""}
            body = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            return {**self._head(chunk=True), "choices": [body], **ids}
        if not choice.echo_text:
            return None
        body = {
            "index": choice.index,
            "text": choice.echo_text,
            "logprobs": None,
            "finish_reason": None,
            **ids,
        }
        return {**self._head(chunk=True), "choices": [body]}

    def content(self, piece: Piece) -> dict[str, Any]:
        """The text of a piece where a chunk has it."""
        return {"delta": {"content": piece.text}} if self.api == "chat" else {"text": piece.text}

    def chunk(self, choice: Choice, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        """One piece of a streamed answer with its content: that of the piece, or what parsers made of it."""
        body = {
            "index": choice.index,
            **content,
            "logprobs": self._logprobs(list(piece.tokens), choice.text_chars),
            "finish_reason": piece.finish,
            **({"stop_reason": piece.stop_reason} if piece.finish else {}),
            **({"token_ids": [token.id for token in piece.tokens]} if self.token_ids else {}),
        }
        return {**self._head(chunk=True), "choices": [body]}

    def around_text(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """The bytes of a piece's event before and after its text, if a piece can hold nothing else."""
        if self.logprobs is not None or self.token_ids:
            return None
        piece = Piece(text=_TEXT, tokens=(), num_tokens=0, finish=None, stop_reason=None)
        before, _, after = frame(self.chunk(choice, piece, self.content(piece))).rpartition(
            msgspec.json.encode(_TEXT)
        )
        return before, after

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage."""
        return {**self._head(chunk=True), "choices": [], "usage": self.usage(choices)}

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """The answer that is not streamed."""
        body = {**self._head(chunk=False), "choices": [self._whole_choice(c) for c in choices]}
        if self.api == "chat":
            body["prompt_logprobs"] = choices[0].prompt_logprobs
            if self.token_ids:
                body["prompt_token_ids"] = list(choices[0].prompt_ids)
        return {**body, "usage": self.usage(choices)}

    def usage(self, choices: list[Choice], *, details: bool = True) -> dict[str, Any]:
        """Tokens of all choices; a prompt that is answered several times counts once, as vLLM does."""
        prompts = {id(choice.prompt_ids): choice for choice in choices}.values()
        prompt_tokens = sum(len(choice.prompt_ids) for choice in prompts)
        completion_tokens = sum(choice.num_tokens for choice in choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        if details:
            usage["prompt_tokens_details"] = {
                "cached_tokens": sum(choice.cached_tokens for choice in prompts)
            }
            reasoning = [c.reasoning_tokens for c in choices if c.reasoning_tokens is not None]
            if reasoning:
                usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return usage

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice.index}
        if self.api == "chat":
            message = choice.parsed or {"content": choice.text}
            body["message"] = {"role": "assistant", "refusal": None, **message}
        else:
            body["text"] = choice.echo_text + choice.text
            body["prompt_logprobs"] = choice.prompt_logprobs
            if self.token_ids:
                body["prompt_token_ids"] = list(choice.prompt_ids)
        body["logprobs"] = self._logprobs(choice.tokens, len(choice.echo_text))
        body["finish_reason"] = choice.finish
        body["stop_reason"] = choice.stop_reason
        if self.token_ids:
            body["token_ids"] = [token.id for token in choice.tokens]
        return body

    def _logprobs(self, tokens: list[Token], text_offset: int) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        if self.api == "chat":
            return self.logprobs.chat(tokens)
        return self.logprobs.completion(tokens, text_offset=text_offset)

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self.api == "chat":
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
