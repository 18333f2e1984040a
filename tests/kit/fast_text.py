"""The rule by which a fast path makes text of tokens, in a few lines of Python to compare others with."""

import codecs
import json

from pdd.router.fastpath.vocabulary import Vocabulary


class FastText:
    """Text of tokens from the middle of an answer, as far as a table tells it.

    Args:
        vocabulary: The table.

    ``num_tokens`` says how many were taken, ``held`` how many of the last ones have given no text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.num_tokens = 0
        self.held = 0
        self._vocabulary = vocabulary
        self._bytes = b""

    def take(self, token_id: int) -> str | None:
        """The token's text; none if it is left to the detokenizer, then nothing was taken."""
        if not 0 <= token_id < len(self._vocabulary.offsets) - 1:
            return None
        begin, end = self._vocabulary.offsets[token_id : token_id + 2]
        if begin == end:
            return None
        joined = self._bytes + self._vocabulary.data[begin:end]
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            escaped = decoder.decode(joined)
        except UnicodeDecodeError:
            return None
        self.num_tokens += 1
        if decoder.getstate()[0]:  # it ends inside a character
            self._bytes, self.held = joined, self.held + 1
            return ""
        self._bytes, self.held = b"", 0
        text: str = json.loads(f'"{escaped}"')
        return text
