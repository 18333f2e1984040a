"""How a request moves from RLD to MD once MD holds the prompt's KV: one-shot or catch-up.

One-shot stops RLD and sends all eager tokens at once: RLD is free soonest, the client waits while MD
recomputes them. Catch-up sends them in rounds while RLD goes on, until MD has few left to compute: the
client hardly waits, RLD stays busy longer. So an idle RLD catches up and a busy one hands over at once, with
hysteresis between two load ratios so that a load near one of them does not flap.

What MD has left to compute is more than what RLD made during the last round. A prefix cache keeps whole
blocks, so MD computes the block that the round left incomplete once more::

    left = made - (computed - computed mod block)

A round that begins at a block's end leaves none, so RLD speaks on to that end where the incomplete block
alone is too much.

Example:
    RLD at 80 % of its capacity, ``busy_ratio`` 0.75: one-shot, reason ``relay_busy``, until the load
    falls below ``idle_ratio`` 0.5.
"""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["one-shot", "catch-up"]
Move = Literal["round", "wait", "hand_over"]
HandoffReason = Literal["forced", "small_gap", "relay_busy", "relay_idle", "hysteresis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffParams:
    """Parameters; ``PolicyConfig`` explains each."""

    forced: Literal["auto", "one-shot", "catch-up"]
    one_shot_max_gap_tokens: int
    catch_up_gap_tokens: int
    catch_up_max_rounds: int
    block_tokens: int
    busy_ratio: float
    idle_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """When catch-up ends.

    Attributes:
        stop_gap_tokens: MD may be left so many tokens to compute while the client waits.
        max_rounds: Bound on rounds.
        block_tokens: What a prefix cache keeps or forgets as one; 1 if it keeps every token.
    """

    stop_gap_tokens: int
    max_rounds: int
    block_tokens: int

    def move(self, *, made_tokens: int, computed_tokens: int, rounds: int) -> Move:
        """What comes next while no round runs.

        ``wait``: RLD speaks on to the end of a block; ask again when it has made a token.

        Args:
            made_tokens: Prompt and answer so far.
            computed_tokens: Those of them that the last round computed.
            rounds: Rounds so far.
        """
        incomplete = computed_tokens % self.block_tokens
        left = made_tokens - (computed_tokens - incomplete)
        if left <= self.stop_gap_tokens or rounds >= self.max_rounds:
            return "hand_over"
        if made_tokens // self.block_tokens > computed_tokens // self.block_tokens:
            return "round"
        # Only a whole block more would stay; where the last round began at one's end, that brings nothing.
        return "wait" if incomplete > self.stop_gap_tokens else "hand_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffDecision:
    """How to hand over, and why.

    ``auto_mode`` is what automatic mode says for this RLD now; pass it as ``previous`` next time.
    """

    mode: Mode
    reason: HandoffReason
    auto_mode: Mode
    catch_up: CatchUp


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
        catch_up=CatchUp(
            stop_gap_tokens=params.catch_up_gap_tokens,
            max_rounds=params.catch_up_max_rounds,
            block_tokens=params.block_tokens,
        ),
    )


def _auto_mode(load_ratio: float, previous: Mode, params: HandoffParams) -> tuple[Mode, HandoffReason]:
    if load_ratio >= params.busy_ratio:
        return "one-shot", "relay_busy"
    if load_ratio < params.idle_ratio:
        return "catch-up", "relay_idle"
    return previous, "hysteresis"
