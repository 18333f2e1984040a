"""Log probabilities in the two shapes of the OpenAI API, from what engines say with token IDs."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from pdd.router.engines import WireLogprob
from pdd.router.request.events import Token

UNKNOWN_LOGPROB = -9999.0
"""vLLM's value for a token outside the engine's list."""


class LogprobFormat:
    """Writes tokens as strings.

    Args:
        tokenizer: The model's.
        num_top: Candidates the client asked for.
        as_ids: Write ``token_id:N`` instead of text.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_top: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids

    def _text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """``logprobs`` of a chat choice: one entry per token."""
        return {"content": [self._chat_entry(token) for token in tokens], "refusal": None}

    def _chat_entry(self, token: Token) -> dict[str, Any]:
        entry = _entry(token)
        candidates = [] if entry is None else entry.top_logprobs[: self._num_top]
        return {
            **self._named(token.id, _logprob(entry)),
            "top_logprobs": [self._named(top.token_id, top.logprob) for top in candidates],
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", errors="replace"))}

    def completion(self, tokens: Sequence[Token], *, text_offset: int) -> dict[str, Any]:
        """``logprobs`` of a completion choice: parallel lists, offsets from the start of the text."""
        texts = [self._text(token.id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(text_offset)
            text_offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_logprob(_entry(token)) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        entry = _entry(token)
        if entry is None:
            return None
        # vLLM adds the sampled token, so there may be one more than asked for.
        return {self._text(top.token_id): top.logprob for top in entry.top_logprobs[: self._num_top + 1]}


def _entry(token: Token) -> WireLogprob | None:
    return token.logprobs if isinstance(token.logprobs, WireLogprob) else None


def _logprob(entry: WireLogprob | None) -> float:
    return UNKNOWN_LOGPROB if entry is None else max(entry.logprob, UNKNOWN_LOGPROB)
