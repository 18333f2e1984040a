"""How a request moves from RLD to MD once MD holds the prompt's KV: one-shot or catch-up.

One-shot stops RLD and sends all eager tokens at once: RLD is free soonest, the client waits while MD
recomputes them. Catch-up sends them in rounds while RLD goes on, until few are missing: the client
hardly waits, RLD stays busy longer. So an idle RLD catches up and a busy one hands over at once, with
hysteresis between two load ratios so that a load near one of them does not flap.

Example:
    RLD at 80 % of its capacity, ``busy_ratio`` 0.75: one-shot, reason ``relay_busy``, until the load
    falls below ``idle_ratio`` 0.5.
"""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["one-shot", "catch-up"]
HandoffReason = Literal["forced", "small_gap", "relay_busy", "relay_idle", "hysteresis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffParams:
    """Parameters; ``PolicyConfig`` explains each."""

    forced: Literal["auto", "one-shot", "catch-up"]
    one_shot_max_gap_tokens: int
    catch_up_gap_tokens: int
    catch_up_max_rounds: int
    busy_ratio: float
    idle_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffDecision:
    """How to hand over, and why.

    ``auto_mode`` is what automatic mode says for this RLD now; pass it as ``previous`` next time.
    """

    mode: Mode
    reason: HandoffReason
    auto_mode: Mode
    stop_gap_tokens: int
    max_rounds: int


def decide_handoff(
    *, gap_tokens: int, relay_load_ratio: float, previous: Mode, params: HandoffParams
) -> HandoffDecision:
    """The handoff mode of one request.

    Args:
        gap_tokens: Eager tokens whose KV MD lacks.
        relay_load_ratio: RLD's open requests over its capacity.
        previous: What automatic mode last said for this RLD.
        params: Thresholds.
    """
    auto_mode, reason = _auto_mode(relay_load_ratio, previous, params)
    mode = auto_mode
    if gap_tokens <= params.one_shot_max_gap_tokens:
        mode, reason = "one-shot", "small_gap"
    if params.forced != "auto":
        mode, reason = params.forced, "forced"
    return HandoffDecision(
        mode=mode,
        reason=reason,
        auto_mode=auto_mode,
        stop_gap_tokens=params.catch_up_gap_tokens,
        max_rounds=params.catch_up_max_rounds,
    )


def _auto_mode(load_ratio: float, previous: Mode, params: HandoffParams) -> tuple[Mode, HandoffReason]:
    if load_ratio >= params.busy_ratio:
        return "one-shot", "relay_busy"
    if load_ratio < params.idle_ratio:
        return "catch-up", "relay_idle"
    return previous, "hysteresis"


def catch_up_ends(*, gap_tokens: int, rounds: int, stop_gap_tokens: int, max_rounds: int) -> bool:
    """Whether RLD is stopped now: the gap is small enough, or the rounds are used up."""
    return gap_tokens <= stop_gap_tokens or rounds >= max_rounds
