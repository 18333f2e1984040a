"""Whether a request is taken in at all: some engine must be able to compute its prompt and some to go on."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDecision:
    """Whether the request is served, and if not, what is missing."""

    admitted: bool
    reason: Literal["ok", "no_prefill_engine", "no_decode_engine"]


def decide_admission(*, prefills: int, relays: int, mains: int) -> AdmissionDecision:
    """Admission by the number of usable engines of each role."""
    if not prefills:
        return AdmissionDecision(admitted=False, reason="no_prefill_engine")
    if not relays and not mains:
        return AdmissionDecision(admitted=False, reason="no_decode_engine")
    return AdmissionDecision(admitted=True, reason="ok")
