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
