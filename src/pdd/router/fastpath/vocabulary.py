"""What each token of a model adds to a text, as a table that native code can read.

It owns which tokens' text does not depend on their neighbours, so that joining the table's entries is
what the tokenizer's own ``DecodeStream`` gives. It knows no answer and no connection.

Whoever reads the table keeps the bytes of tokens while they end inside a character, gives all of them
once they are whole UTF-8, and leaves a token to the ``Detokenizer`` whose entry is empty, or whose bytes
could not follow. Two kinds of decoders satisfy that:

- ``ByteLevel`` joins the tokens' bytes.
- SentencePiece's with byte fallback: ``Replace`` of "▁" by a space, ``ByteFallback``, ``Fuse`` and possibly
  ``Strip`` of one space at the start. The strip acts on the start of what ``DecodeStream`` decodes, which
  is the text before the new token, so in the middle of an answer nothing is stripped. A run of byte tokens
  that is not UTF-8 changes the text before it, but such a run is left to the ``Detokenizer``.

``Metaspace``, ``WordPiece``, ``CTC`` and others look at a token's place or neighbours, or are not known here.

Source:
    huggingface/tokenizers: ``step_decode_stream``, ``ByteLevel`` and ``ByteFallback`` as decoders.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer

_BYTE_FALLBACK = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""What Rust's ``u8::from_str_radix`` takes, a plus sign too."""

_REPLACEMENT = "\ufffd".encode()
_LEAD = _REPLACEMENT[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The JSON-escaped text of every token, without quotes.

    Bytes beyond ASCII are as they are, so entries can be joined where tokens hold parts of a character.

    Args:
        offsets: Where each token's text begins in ``data``, and, one more, where the last one's ends.
        data: The texts. An empty one says that the token is not to be looked up here: an added token, an
            ID without a token, a token without bytes, or one that may end with U+FFFD, alone or with
            those after it: ``DecodeStream`` takes that for an unfinished character.
    """

    offsets: "array[int]"
    data: bytes


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary | None:
    """The tokenizer's tokens as a table; none if its decoder is of a kind that cannot be one."""
    escaped = _escaping(list(_steps(tokenizer)))
    if escaped is None:
        return None
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    data, offsets = bytearray(), array("I", [0])
    for token in _tokens(tokenizer):
        if token is not None and token not in added:
            text = escaped(token)
            if _LEAD not in text or not _may_be_held(text):
                data += text
        offsets.append(len(data))
    return Vocabulary(offsets=offsets, data=bytes(data))


def _tokens(tokenizer: Tokenizer) -> Iterator[str | None]:
    """The token of every ID from 0 until all were seen, as decoding sees them: added ones come first.

    One by one, since a dictionary of all would cost the router 20 MB of memory, of which some stays.
    """
    num_left = tokenizer.get_vocab_size()
    for token_id in range(2 * num_left):  # few IDs are without a token
        token = tokenizer.id_to_token(token_id)
        yield token
        num_left -= token is not None
        if not num_left:
            return


def _steps(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The steps of the tokenizer's decoder; its own state, as the whole tokenizer's has all merges."""
    waiting = [] if tokenizer.decoder is None else [json.loads(tokenizer.decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting[:0] = step["decoders"]
        else:
            yield step


def _escaping(steps: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """What turns a token into its escaped text under a decoder of these steps, if we know them."""
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level()
    if steps in (_BYTE_FALLBACK, [*_BYTE_FALLBACK, _STRIP]):
        return _byte_fallback()
    return None


def _byte_level() -> Callable[[str], bytes]:
    """Each character stands for a byte: printable Latin-1 for itself, the next ones for the others."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    shown = {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}
    # Bytes as Latin-1, which has no character for what is not shown.
    table = dict.fromkeys(range(0x100), "\ufffd")
    table |= {char: _escape_byte(byte).decode("latin-1") for char, byte in shown.items()}

    def escaped(token: str) -> bytes:
        try:
            return token.translate(table).encode("latin-1")
        except UnicodeEncodeError:  # a token that is no such writing of bytes is taken as it is
            return _escape(token)

    return escaped


def _byte_fallback() -> Callable[[str], bytes]:
    """A token stands for itself, but for spaces and the tokens of single bytes."""

    def escaped(token: str) -> bytes:
        text = token.replace("▁", " ")
        byte = _BYTE_TOKEN.fullmatch(text)
        return _escape(text) if byte is None else _escape_byte(int(byte[1], 16))

    return escaped


def _escape(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def _escape_byte(byte: int) -> bytes:
    return _escape(chr(byte)) if byte < 0x80 else bytes([byte])


def _may_be_held(text: bytes) -> bool:
    """Whether it has U+FFFD, or ends with bytes that the next token may make one of."""
    return _REPLACEMENT in text or text.endswith((_REPLACEMENT[:1], _REPLACEMENT[:2]))
