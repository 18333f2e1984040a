"""Whether KV is coded for the wire: only where the line is slower than the coder.

Coding and sending overlap, so coded KV crosses at the slower of the two::

    coded rate = min(coder rate, ratio x line rate)        plain rate = line rate

It is worth its processor time when the first is above the second by a margin.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingParams:
    """When coding is worth its processor time.

    Attributes:
        min_gain_ratio: How much faster coded KV must cross. Below a tenth the processor is worth more; what
            is no bf16 has a ratio of about 1 and is never coded.
    """

    min_gain_ratio: float = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingSnapshot:
    """What was measured on one link.

    Attributes:
        line_rate_bytes_per_s: Bytes a second that the line takes; None before it was measured.
        coder_rate_bytes_per_s: KV bytes a second that all threads of the link together code; None likewise.
        ratio: KV bytes a coded byte; None likewise.
    """

    line_rate_bytes_per_s: float | None
    coder_rate_bytes_per_s: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingDecision:
    """Whether the next pieces are coded, and why."""

    is_coded: bool
    reason: str


def decide_coding(snapshot: CodingSnapshot, params: CodingParams) -> CodingDecision:
    """Coded if KV crosses faster so; until all is measured, in clear."""
    line, coder, ratio = (
        snapshot.line_rate_bytes_per_s,
        snapshot.coder_rate_bytes_per_s,
        snapshot.ratio,
    )
    if line is None or coder is None or ratio is None:
        return CodingDecision(is_coded=False, reason="not_measured")
    if min(coder, ratio * line) >= params.min_gain_ratio * line:
        return CodingDecision(is_coded=True, reason="line_is_slower")
    reason = "coder_is_slower" if coder < params.min_gain_ratio * line else "does_not_compress"
    return CodingDecision(is_coded=False, reason=reason)
