"""What the demo asks: an agent-like conversation over a long document, then unrelated requests at once."""

from dataclasses import dataclass, field
from importlib.resources import files

SYSTEM = "You are a careful assistant. You answer from the report you are given, in a few short sentences."


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question of the conversation and how long its answer may be."""

    question: str
    max_tokens: int


TURNS = (
    # The document's KV crosses now: the answer is long enough to go on while it does.
    Turn(question="Tell what happened that night in detail, from the beginning to the end.", max_tokens=240),
    Turn(question="Who noticed first that something was wrong, and how?", max_tokens=56),
    Turn(question="Why did it take so long to find the cause?", max_tokens=56),
    Turn(question="Which changes were agreed on? List them.", max_tokens=56),
)
UNRELATED = (
    "Name three rivers in Europe.",
    "Write a haiku about rain on a tin roof.",
    "Explain in one sentence what a tide is.",
)
UNRELATED_MAX_TOKENS = 40

Message = dict[str, str]


def report() -> str:
    """The document the conversation is about."""
    return (files("pdd.cli.demo") / "data" / "report.txt").read_text(encoding="utf-8")


@dataclass(slots=True)
class Conversation:
    """A conversation whose history grows with every turn, as an agent's does."""

    messages: list[Message] = field(
        default_factory=lambda: [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Here is a report.\n\n{report()}\n\n{TURNS[0].question}"},
        ]
    )

    def answered(self, answer: str, next_question: str | None) -> None:
        """The answer, and the next question if there is one, belong to the history."""
        self.messages.append({"role": "assistant", "content": answer})
        if next_question is not None:
            self.messages.append({"role": "user", "content": next_question})
