"""Which engine of a role takes a request when some already hold part of its prompt.

Formula:
    ``cost_s = wait_s + work_s``: how long until the engine gets to the request, and what its missing part
    costs there (prefill time on P, transfer time to MD). Cheapest first, ties by id.

Example:
    The engine that served the previous turn waits 2 s and lacks 0.1 s of work; an idle one lacks 1.5 s: the
    idle one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCandidate:
    """One engine that could take the request.

    Args:
        id: The engine.
        wait_s: Predicted wait before it starts.
        work_s: Predicted cost of what its cache lacks.
    """

    id: int
    wait_s: float
    work_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityDecision:
    """The engine and why."""

    id: int
    reason: Literal["only_candidate", "cheapest"]


def place_near_cache(candidates: Iterable[CacheCandidate]) -> AffinityDecision:
    """The cheapest candidate.

    Raises:
        ValueError: If there is none.
    """
    ordered = sorted(candidates, key=lambda candidate: (candidate.wait_s + candidate.work_s, candidate.id))
    if not ordered:
        raise ValueError("no candidate to place the request on")
    return AffinityDecision(id=ordered[0].id, reason="only_candidate" if len(ordered) == 1 else "cheapest")
