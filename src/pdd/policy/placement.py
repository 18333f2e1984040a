"""Which engine of a role serves a request: the least loaded healthy one, ties broken by id.

One whose breaker is open comes behind all others.

Example:
    ``p0`` runs 3 of 8, ``p1`` 2 of 8: ``p1``, ``p0``. With ``p1`` tripped: ``p0``, ``p1``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pdd.policy.snapshot import EngineView


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """Engine ids in the order to try them; empty if none can be used."""

    order: tuple[str, ...]
    reason: Literal["least_loaded", "none_healthy"]


def place(engines: Iterable[EngineView], *, needs_kv: bool = True) -> PlacementDecision:
    """The engines of one role, best first.

    Args:
        engines: All engines of the role.
        needs_kv: Only engines whose agent is connected count.
    """
    usable = [engine for engine in engines if engine.healthy and (engine.kv_ready or not needs_kv)]
    usable.sort(key=lambda engine: (engine.tripped, engine.load_ratio, engine.id))
    order = tuple(engine.id for engine in usable)
    return PlacementDecision(order=order, reason="least_loaded" if order else "none_healthy")
