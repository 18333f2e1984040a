"""How much KV leaves before the receiver has said that it lacks it.

Asking (OFFER, WANT) costs a round trip. It is hidden while other bytes fill the line, and it keeps the bytes
on the line equal to the missing chunks; for a lone chunk on a long idle line it is most of the time. So
chunks that the receiver almost surely lacks go out behind their offer, at most as cross until it answers::

    window = min(credit, max(chunk, rate x rtt)) - bytes already on their way

"Almost surely" is what earlier answers say of chunks in the same position: the chance that the bytes are sent
in vain must be within ``max_waste_ratio``.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final


class Position(Enum):
    """What stands in front of a chunk in its prompt: keys are chained, so it says most about the chunk."""

    FIRST = auto()
    """Nothing."""
    AFTER_HELD = auto()
    """A chunk the receiver has. It may have the next one too, if that is an answer it has given itself."""
    AFTER_LACKING = auto()
    """A chunk the receiver lacks: what follows can only be there if the middle of a prefix was evicted."""


PRIOR_LACKING_RATIO: Final = {
    Position.FIRST: 1.0,
    Position.AFTER_HELD: 0.0,
    Position.AFTER_LACKING: 1.0,
}
"""Belief before the first answer, for keys that nothing is known of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaskedParams:
    """When asking first is worth its round trip.

    Attributes:
        max_waste_ratio: Part of the unasked bytes that may be in vain: what is promised of all bytes on the
            line is 2 % beyond the missing chunks.
        min_rtt_s: Below this round trip asking costs less than what it may save: on a local network it is
            0.1 to 0.5 ms, seen by agents as 1 to 2 ms, and the sites meant here are 5 to 60 ms apart.
    """

    max_waste_ratio: float = 0.02
    min_rtt_s: float = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaskedSnapshot:
    """What is known of the line to one receiver.

    Attributes:
        rtt_s: Round trip; None before it was measured.
        rate_bytes_per_s: Measured rate; None before it was measured.
        outstanding_bytes: Bytes on their way or queued, asked for or not.
        unasked_bytes: Those of them that were not asked for, and not answered yet.
        credit_bytes: The most the receiver takes unasked at once.
        chunk_bytes: Size of a chunk, the unit of all this.
    """

    rtt_s: float | None
    rate_bytes_per_s: float | None
    outstanding_bytes: int
    unasked_bytes: int
    credit_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaskedDecision:
    """How many chunks may go out unasked now, and why."""

    num_chunks: int
    reason: str


def decide_unasked(snapshot: UnaskedSnapshot, params: UnaskedParams) -> UnaskedDecision:
    """The chunks that may leave before their offer is answered, if they are almost surely lacking."""
    if snapshot.credit_bytes < snapshot.chunk_bytes:
        return UnaskedDecision(num_chunks=0, reason="no_credit")
    if snapshot.rtt_s is None or snapshot.rtt_s < params.min_rtt_s:
        return UnaskedDecision(num_chunks=0, reason="near")
    on_the_line_bytes = (snapshot.rate_bytes_per_s or 0.0) * snapshot.rtt_s
    window_bytes = max(snapshot.chunk_bytes, on_the_line_bytes) - snapshot.outstanding_bytes
    room_bytes = min(window_bytes, snapshot.credit_bytes - snapshot.unasked_bytes)
    num_chunks = max(0, int(room_bytes // snapshot.chunk_bytes))
    return UnaskedDecision(num_chunks=num_chunks, reason="window" if num_chunks else "line_is_busy")


def is_worth_sending(lacking_ratio: float, params: UnaskedParams) -> bool:
    """Whether a chunk that is lacking with this chance may be sent without asking."""
    return lacking_ratio >= 1.0 - params.max_waste_ratio
