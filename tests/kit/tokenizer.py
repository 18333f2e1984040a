"""A byte-level tokenizer of our own making: characters beyond ASCII split over several tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = "<|end|>"
ROLE_START = "<|role|>"


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True), AddedToken(ROLE_START, special=True)])
    return tokenizer


WORD_PIECES = [b"hello", b" world", b"0", b'say "no"\\\n', b"\t\x01\x1f\x7f/", "né".encode(), "你好".encode()]
SPLIT_PIECES = bytes.fromhex("f0 00 9f 00 98 00 80 00 f09f 00 9880 00 61f09f 00 988062 00 9880e4").split(
    b"\0"
)
SPLIT_PIECES += bytes.fromhex("e4 00 bda0 00 a0e4bd 00 c3 00 a9 00 e280 00 a8").split(b"\0")
BAD_PIECES = bytes.fromhex("ff 00 c0 00 e0 00 ed 00 a0 00 f4 00 e461 00 8078").split(b"\0")
REPLACEMENT_PIECES = bytes.fromhex("ef 00 efbf 00 bfbd 00 bd 00 bf 00 efbb 00 61efbfbd 00 efbfbd62").split(
    b"\0"
)


def pieces_tokenizer() -> Tokenizer:
    """A byte-level tokenizer whose tokens hold words, parts of characters, and what is no character.

    Three of its IDs, before the last of the added tokens, are without a token.
    """
    shown = _shown_bytes()
    tokens = [
        "".join(shown[byte] for byte in piece)
        for piece in [*WORD_PIECES, *SPLIT_PIECES, *BAD_PIECES, *REPLACEMENT_PIECES]
    ]
    tokens += ["日本", "a b", "é\xad"]  # no writing of bytes
    vocab = {token: i for i, token in enumerate(tokens)} | {"last": len(tokens) + 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer)
    return tokenizer


def sentencepiece_tokenizer(*, strips: bool) -> Tokenizer:
    """One that writes spaces as SentencePiece does, with a token for each byte.

    Args:
        strips: Whether a space before the first word is no text.
    """
    words = ["▁", "▁▁", "▁a", "a", "▁say", '"\\\n', "é", "你好"]
    odd = ["\ufffd", "x\ufffd", "\ufffdx", "<0xZZ>", "<0x+A>"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *odd]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_tokens(tokenizer)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])


def _shown_bytes() -> list[str]:
    """How byte-level tokens write each byte, as the pre-tokenizer has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(char): char for char in alphabet if ord(char) < 0x100}
    others = iter(char for char in alphabet if ord(char) >= 0x100)
    return [own.get(byte) or next(others) for byte in range(0x100)]
