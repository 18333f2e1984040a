"""The fake engines' model: the next token is a function of the whole token history, and of nothing else."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.kit.tokenizer import EOS, ROLE_START, byte_tokenizer
from tokenizers import Tokenizer

_LEADS = (b"\xc3", b"\xe2", b"\xf0")
_LETTERS = b"etaoinshrdlucmfwypvbgkjqxz      ."


@dataclass
class FakeModel:
    """Deterministic text with characters of one to four bytes, one token per byte.

    Args:
        eos_lengths: Where the history has one of these lengths, the next token is EOS.
    """

    eos_lengths: frozenset[int] = frozenset()
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)

    def __post_init__(self) -> None:
        vocab = self.tokenizer.get_vocab()
        encode = self.tokenizer.encode
        self.eos: int = vocab[EOS]
        self.role_start: int = vocab[ROLE_START]
        self._id_of_byte = {}
        for text in ("é", "€", "😀", *map(chr, range(128))):
            for token_id, byte in zip(encode(text).ids, text.encode(), strict=True):
                self._id_of_byte[byte] = token_id
        for code in (*range(0xA0, 0xC0), *range(0x80, 0xA0)):
            char = (bytes([0xC3, code]) if code < 0xC0 else b"").decode("utf-8", errors="ignore")
            for token_id, byte in zip(encode(char).ids, char.encode(), strict=True):
                self._id_of_byte[byte] = token_id
        self._byte_of_id = {token_id: byte for byte, token_id in self._id_of_byte.items()}

    def next_token(self, history: Sequence[int], *, may_end: bool = True) -> int:
        """The token after ``history``."""
        if may_end and len(history) in self.eos_lengths:
            return self.eos
        noise = int.from_bytes(hashlib.sha256(repr(tuple(history)).encode()).digest()[:4], "big")
        recent = bytes(self._byte_of_id.get(token, 0x20) for token in history[-3:])
        return self._id_of_byte[self._next_byte(recent, noise)]

    def _next_byte(self, recent: bytes, noise: int) -> int:
        for start, whole in ((b"\xe2", "€".encode()), (b"\xf0", "😀".encode())):
            for cut in range(1, len(whole)):
                if recent.endswith(whole[:cut]) and whole.startswith(start):
                    return whole[cut]
        if recent.endswith(b"\xc3"):
            return 0xA0 + noise % 0x20
        kind = noise % 10
        if kind < 3:
            return _LEADS[kind][0]
        return _LETTERS[(noise >> 8) % len(_LETTERS)]

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What one plain engine would answer."""
        history = list(prompt)
        for _ in range(max_tokens):
            history.append(self.next_token(history))
            if history[-1] == self.eos:
                break
        return history[len(prompt) :]

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The chat template."""
        ids: list[int] = []
        for message in messages:
            ids.append(self.role_start)
            ids += self.tokenizer.encode(f"{message['role']}\n{message['content']}\n").ids
        return [*ids, self.role_start, *self.tokenizer.encode("assistant\n").ids]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special ones and without the first bytes of an unfinished character."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True)).rstrip("\ufffd")
