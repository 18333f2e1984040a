"""Which engine of a role serves a request: the one that is done with it first, as far as load and caches say.

Formula:
    ``score = load_ratio + affinity_weight_ratio * (pending_tokens + prompt_tokens - held_tokens) /
    prompt_tokens``, lowest first, ties by id. ``pending_tokens`` is what the engine has yet to prefill for
    others, ``held_tokens`` what its caches are believed to hold of this prompt. One whose breaker is open
    comes behind all others.

On P the second term decides: a queue of whole prompts outweighs any hit, so a prefix that everybody shares
draws requests only while the engine that holds it keeps up. Decode engines have nothing pending; there the
weight says how much fuller an engine may be for the sake of the whole prefix.

Example:
    Weight 0.5. ``md0`` runs 5 of 8 and holds 1536 of 2048 tokens: 0.625 + 0.5 * 0.25 = 0.75. ``md1`` runs 3
    of 8 and holds none: 0.375 + 0.5 = 0.875. So ``md0``, ``md1``; with one more on ``md0`` (0.875, a tie,
    by id) still; with two more, ``md1``. With ``md0`` tripped: ``md1``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pdd.policy.snapshot import EngineView

Reason = Literal["least_loaded", "prefix_held", "none_healthy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """Engine ids in the order to try them; empty if none can be used."""

    order: tuple[str, ...]
    reason: Reason


def place(
    engines: Iterable[EngineView],
    *,
    needs_kv: bool = True,
    prompt_tokens: int = 0,
    affinity_weight_ratio: float = 0.0,
) -> PlacementDecision:
    """The engines of one role, best first.

    Args:
        engines: All engines of the role.
        needs_kv: Only engines whose agent is connected count.
        prompt_tokens: Tokens of the prompt; 0 if it is not known yet.
        affinity_weight_ratio: See the formula; ``PolicyConfig`` explains it.
    """
    usable = [engine for engine in engines if engine.healthy and (engine.kv_ready or not needs_kv)]

    def score(engine: EngineView) -> float:
        work_ratio = 0.0
        if prompt_tokens > 0:
            work_ratio = (engine.pending_tokens + prompt_tokens - engine.held_tokens) / prompt_tokens
        return engine.load_ratio + affinity_weight_ratio * work_ratio

    usable.sort(key=lambda engine: (engine.tripped, score(engine), engine.id))
    order = tuple(engine.id for engine in usable)
    if not order:
        return PlacementDecision(order=(), reason="none_healthy")
    idlest = min(usable, key=lambda engine: (engine.tripped, engine.load_ratio, engine.id))
    held = usable[0].held_tokens > idlest.held_tokens
    return PlacementDecision(order=order, reason="prefix_held" if held else "least_loaded")
