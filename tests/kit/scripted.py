"""Fake engines that say what a test wants, with the markers of reasoning and tool calls as tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.fake_model import FakeModel
from tests.kit.tokenizer import EOS, byte_tokenizer
from tokenizers import AddedToken, Tokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def marked_tokenizer() -> Tokenizer:
    """The byte tokenizer with one token for each marker, as Qwen's and DeepSeek's have."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """The marked tokenizer in the files vLLM and transformers read."""
    marked_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "{EOS}"}}'
    )


@dataclass
class ScriptedModel(FakeModel):
    """Answers one prompt with ``script`` and the end."""

    tokenizer: Tokenizer = field(default_factory=marked_tokenizer)
    prompt: list[int] = field(default_factory=list)
    script: list[int] = field(default_factory=list)

    def say(self, messages: Sequence[dict[str, str]], text: str) -> None:
        """The next answer to ``messages`` is ``text``."""
        self.prompt = self.chat_prompt(messages)
        self.script = list(self.tokenizer.encode(text).ids)

    def next_token(self, history: Sequence[int], *, may_end: bool = True) -> int:
        """The token of the script at this place."""
        place = len(history) - len(self.prompt)
        return self.script[place] if place < len(self.script) else self.eos
