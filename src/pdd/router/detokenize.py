"""Turns the token IDs of one answer into text, whatever engine made each of them.

Since no engine sees the whole answer, stop strings and the bytes of characters that are split over a
handoff are handled here. The behaviour is that of vLLM's own detokenizer.

Source:
    vllm/v1/engine/detokenizer.py@0.32.0 (``FastIncrementalDetokenizer``, ``check_stop_strings``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pdd.core.errors import ConfigurationError

PROMPT_TAIL_TOKENS = 64
"""How much of the prompt seeds the decoder: enough for any split character, cheap for any prompt."""

_INVALID_PREFIX = "Invalid prefix encountered"


def load_tokenizer(model_path: str) -> Tokenizer:
    """The model's tokenizer, from its folder or from the Hugging Face cache or hub.

    Raises:
        ConfigurationError: If there is none.
    """
    file = Path(model_path) / "tokenizer.json"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        return Tokenizer.from_pretrained(model_path)
    except Exception as error:
        raise ConfigurationError(
            f"model.path: no usable tokenizer.json in {model_path!r}: {error}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The client's wishes about the text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """A stop string ended the text."""

    stop: str


class Detokenizer:
    """Incremental text of one answer; feed every token once, in order."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], options: TextOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._stream = DecodeStream(
            ids=list(prompt_ids[-PROMPT_TAIL_TOKENS:]), skip_special_tokens=options.skip_special_tokens
        )
        self._held_back = (
            max((len(s) for s in options.stop), default=1) - 1 if not options.include_stop else 0
        )
        self._looked_back = max((len(s) for s in options.stop), default=1) - 1
        self._num_tokens = 0
        self._text = ""
        self._given = 0
        self._ends_in_text = False

    @property
    def is_at_boundary(self) -> bool:
        """All text so far was given, and the next token's does not depend on those before.

        Said only after a token that gave text, since one that gave none may have been part of a character.
        """
        return self._ends_in_text and self._given == len(self._text) and not self._options.stop

    def feed(self, token_id: int, *, ends_as_stop_token: bool = False) -> StopMatch | None:
        """Append one token's text.

        Args:
            token_id: The next token.
            ends_as_stop_token: It is the EOS or stop token that ended the answer, so it is no text
                unless stops are to be included.

        Returns:
            The stop string that now ends the text, if any; the text is cut there.
        """
        new = self._decode(token_id) if not ends_as_stop_token or self._options.include_stop else ""
        self._text += new
        self._num_tokens += 1
        if not self._options.stop or self._num_tokens <= self._options.min_tokens:
            return None
        return self._check_stop(len(new))

    def more(self, token_ids: Sequence[int]) -> str:
        """``feed`` and ``take`` in one, for tokens in the middle of an answer without stop strings."""
        self._num_tokens += len(token_ids)
        if len(token_ids) == 1 and not self._text:
            return self._decode(token_ids[0])
        self._text += "".join([self._decode(token_id) for token_id in token_ids])
        return self.take(finished=False)

    def resume(self, token_ids: Sequence[int], *, held: int, new_tokens: int) -> None:
        """Stand where it would had it seen the tokens that others made text of since ``is_at_boundary``.

        Args:
            token_ids: The last tokens of the answer: the held ones and those that gave the last text, which
                are no more than a character has bytes. Still earlier ones do not matter.
            held: How many of them, at the end, have given no text yet, since they end inside a character.
            new_tokens: How many tokens it has not seen, the held ones included.
        """
        num_given = len(token_ids) - held
        if new_tokens > held:
            self._stream = DecodeStream(
                ids=self._last_text(token_ids[:num_given]),
                skip_special_tokens=self._options.skip_special_tokens,
            )
            self._num_tokens += new_tokens - held
        for token_id in token_ids[num_given:]:
            self.feed(token_id)

    def take(self, *, finished: bool) -> str:
        """The text not yet given out, less what may still turn out to be the start of a stop string."""
        end = len(self._text) if finished else len(self._text) - self._held_back
        if end <= self._given:
            return ""
        delta = self._text[self._given : end]
        # Of what is given, only so much is kept as a stop string could begin in.
        kept = max(0, end - self._looked_back)
        self._text, self._given = self._text[kept:], end - kept
        return delta

    def _last_text(self, token_ids: Sequence[int]) -> list[int]:
        """The fewest tokens at the end that do not begin inside a character, which is what a stream keeps.

        More would not do: where tokens are single bytes, one that cannot follow spoils all of their run that
        the stream knows, and a run that begins inside a character is spoilt from the start.
        """
        num = 1
        while num < len(token_ids) and self._tokenizer.decode(token_ids[-num:]).endswith("\ufffd"):
            num += 1
        return list(token_ids[-num:])

    def _decode(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except (OverflowError, TypeError):
            text = ""
        except Exception as error:
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            # Some tokenizers produce non-monotonic text at invalid UTF-8; start anew from this token.
            self._stream = DecodeStream(skip_special_tokens=self._options.skip_special_tokens)
            text = self._stream.step(self._tokenizer, token_id) or ""
        self._ends_in_text = text != ""
        return text

    def _check_stop(self, new_chars: int) -> StopMatch | None:
        """Cut the text at the stop string that completes first within the new characters."""
        if not new_chars:
            return None
        best: tuple[int, str] | None = None
        for stop in self._options.stop:
            start = self._text.find(stop, max(0, len(self._text) - new_chars - len(stop) + 1))
            if start != -1 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        if best is None:
            return None
        end, stop = best
        self._text = self._text[: end if self._options.include_stop else end - len(stop)]
        return StopMatch(stop=stop)
