"""Whether a request is taken in, now, later or not at all.

Two questions. Can it be served: some engine must be able to compute its prompt and some to go on. Is there
room: up to ``max_concurrent`` requests run, ``queue_size`` more wait, the most urgent first; beyond that the
least urgent is refused, with a hint when to come back.

Formula:
    ``retry_after_s = (queued + 1) * service_time_s / max_concurrent``, within 1 to 60 s: the time the line
    in front takes at the present pace.

Example:
    100 at once, 50 waiting, 8 s each: the next one would wait 4.08 s; refused, it is told 5 s.
"""

import math
from dataclasses import dataclass
from typing import Literal

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60
"""Clients that come back later than this are as good as lost; estimates beyond it are no better than this."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryInput:
    """Everything the choice looks at.

    Args:
        running: Requests being served.
        queued: Requests that wait.
        priority: Of this one; lower is more urgent, as for vLLM.
        worst_priority: The least urgent that waits, or None if none does.
        service_time_s: Mean time a request was served lately.
        max_concurrent: Most requests served at once.
        queue_size: Most requests that wait.
    """

    running: int
    queued: int
    priority: int
    worst_priority: int | None
    service_time_s: float
    max_concurrent: int
    queue_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryDecision:
    """What happens at the door, and why; ``displace`` refuses the least urgent that waits instead."""

    action: Literal["enter", "wait", "displace", "refuse"]
    reason: Literal["room", "full", "more_urgent", "queue_full"]
    retry_after_s: int


def decide_entry(facts: EntryInput) -> EntryDecision:
    """Admission by room."""
    line_s = (facts.queued + 1) * facts.service_time_s / facts.max_concurrent
    retry_after_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(line_s)))
    if facts.running < facts.max_concurrent and not facts.queued:
        return EntryDecision(action="enter", reason="room", retry_after_s=retry_after_s)
    if facts.queued < facts.queue_size:
        return EntryDecision(action="wait", reason="full", retry_after_s=retry_after_s)
    if facts.worst_priority is not None and facts.priority < facts.worst_priority:
        return EntryDecision(action="displace", reason="more_urgent", retry_after_s=retry_after_s)
    return EntryDecision(action="refuse", reason="queue_full", retry_after_s=retry_after_s)
