"""A generator of agent traffic with stated parameters, and a plain one for queueing checks.

Owns the session process: system prompts shared by group, turns that append, breaks, compactions, resets
after a human's gap, and cold one-shot prompts. The defaults were fitted to public agent traces
(``docs/explanation/simulator.md``).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdd.sim.workload.agent import BLOCK_TOKENS
from pdd.sim.workload.stream import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Lognormal of a median and log-sigma, clipped to a range."""

    median: float
    sigma: float
    low: float
    high: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
        """That many values."""
        values = np.exp(math.log(self.median) + self.sigma * rng.standard_normal(count))
        clipped: np.ndarray[Any, Any] = np.minimum(np.maximum(values, self.low), self.high)
        return clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParameters:
    """What describes the session process; lengths in tokens, times in seconds."""

    groups: int = 12
    system: LogNormal = LogNormal(median=16_000, sigma=0.35, low=4_000, high=40_000)
    first: LogNormal = LogNormal(median=12_000, sigma=1.3, low=50, high=120_000)
    turns: LogNormal = LogNormal(median=60, sigma=1.1, low=1, high=400)
    output: LogNormal = LogNormal(median=680, sigma=0.9, low=16, high=16_000)
    append: LogNormal = LogNormal(median=300, sigma=1.1, low=10, high=30_000)
    big_append: LogNormal = LogNormal(median=4_500, sigma=0.8, low=1_000, high=60_000)
    big_append_ratio: float = 0.025
    tool_gap: LogNormal = LogNormal(median=6, sigma=1.2, low=0, high=1_800)
    human_gap: LogNormal = LogNormal(median=90, sigma=1.6, low=0, high=1_800)
    human_ratio: float = 0.12
    service_base_s: float = 1.0
    service_tokens_per_s: float = 50.0
    reset_ratio: float = 0.58
    break_ratio: float = 0.01
    compact_above_tokens: int = 108_000
    compact_to: LogNormal = LogNormal(median=8_000, sigma=0.6, low=1_000, high=40_000)
    cold_ratio: float = 0.014
    cold_input: LogNormal = LogNormal(median=40_000, sigma=0.7, low=16_384, high=200_000)
    cold_output: LogNormal = LogNormal(median=150, sigma=0.7, low=4, high=499)


LEAD_S = 24_000.0
"""Sessions begin up to so long before the window: the longest of 400 turns are about so long."""


@dataclass(slots=True)
class _Rows:
    """Turns inside the window, in the order sessions were made.

    ``previous`` is the position of the turn before in the same session if that is inside too, else -1;
    ``shared`` the tokens repeated from the turn before, inside or not.
    """

    at_s: list[float]
    inputs: list[int]
    outputs: list[int]
    previous: list[int]
    shared: list[int]
    keeps: list[bool]
    group: list[int]
    gap_s: list[float]
    is_first: list[bool]


def generate_agent_workload(
    *, requests: int, rate_per_s: float, seed: int, parameters: AgentParameters | None = None
) -> Workload:
    """Agent traffic in steady state: sessions that began before the window opens are in it with their later
    turns.

    Args:
        requests: Expected number inside the window.
        rate_per_s: Mean request rate.
        seed: Same seed, same workload.
        parameters: Default: the fitted ones.
    """
    p = parameters or AgentParameters()
    rng = np.random.default_rng(seed)
    systems = [int(value) for value in p.system.draw(rng, p.groups).round()]
    weights = 1 / np.arange(1, p.groups + 1)
    span_s = requests / rate_per_s
    # Turns per session from the clipped lognormal, by sampling: there is no short closed form.
    mean_turns = float(p.turns.draw(np.random.default_rng(0), 200_000).round().mean())
    sessions = max(1, round(rate_per_s * (1 - p.cold_ratio) / mean_turns * (span_s + LEAD_S)))
    groups = rng.choice(p.groups, size=sessions, p=weights / weights.sum())
    turns = p.turns.draw(rng, sessions).round().astype(int)
    starts = rng.uniform(-LEAD_S, span_s, sessions)
    rows = _Rows([], [], [], [], [], [], [], [], [])
    outside = 0
    for group, count, start in zip(groups.tolist(), turns.tolist(), starts.tolist(), strict=True):
        outside += _session(rows, rng, p, count, start, span_s, group, systems[group])
    cold = round(requests * p.cold_ratio)
    _append_cold(rows, rng, p, cold, span_s)
    return _columns(rows, systems, f"{outside} turns outside the window (before it opens or after it closes)")


def _session(
    rows: _Rows,
    rng: np.random.Generator,
    p: AgentParameters,
    turns: int,
    begin_s: float,
    end_s: float,
    group: int,
    system: int,
) -> int:
    """Appends a session's turns inside the window; returns how many lay outside."""
    outputs = p.output.draw(rng, turns).astype(int)
    is_human = rng.random(turns) < p.human_ratio
    gaps = np.where(is_human, p.human_gap.draw(rng, turns), p.tool_gap.draw(rng, turns))
    service = p.service_base_s + outputs / p.service_tokens_per_s
    at = begin_s + np.concatenate(((0.0,), np.cumsum(gaps + service)[:-1]))
    first, last = int(np.searchsorted(at, 0.0)), int(np.searchsorted(at, end_s))
    if first >= last:
        return turns
    appended = np.where(
        rng.random(last) < p.big_append_ratio, p.big_append.draw(rng, last), p.append.draw(rng, last)
    ).astype(int)
    resets = (is_human[:last] & (rng.random(last) < p.reset_ratio)).tolist()
    breaks = (rng.random(last) < p.break_ratio).tolist()
    cuts = rng.random(last).tolist()
    compacted = p.compact_to.draw(rng, last).astype(int).tolist()
    length = system + round(float(p.first.draw(rng, 1)[0]))
    shared, keeps = system, False
    limit = p.compact_above_tokens
    grown = (outputs[:last] + appended).tolist()
    lengths, all_shared, all_keep = [], [], []
    for turn in range(last):
        lengths.append(length)
        all_shared.append(shared)
        all_keep.append(keeps)
        before = length
        length += grown[turn]
        if length > limit:
            length, shared, keeps = system + compacted[turn], system, False
        elif resets[turn]:
            shared, keeps = system, False
        elif breaks[turn]:
            shared, keeps = int(system + cuts[turn] * (before - system)), False
        else:
            shared, keeps = before, True
    position, inside = len(rows.at_s), last - first
    rows.at_s += at[first:last].tolist()
    rows.inputs += lengths[first:]
    rows.outputs += outputs[first:last].tolist()
    rows.previous += [-1, *range(position, position + inside - 1)]
    rows.shared += all_shared[first:]
    rows.keeps += all_keep[first:]
    rows.group += [group] * inside
    rows.gap_s += [0.0, *gaps.tolist()][first:last]
    rows.is_first += [turn == 0 for turn in range(first, last)]
    return turns - inside


def _append_cold(
    rows: _Rows, rng: np.random.Generator, p: AgentParameters, count: int, span_s: float
) -> None:
    rows.at_s += rng.uniform(0, span_s, count).tolist()
    rows.inputs += p.cold_input.draw(rng, count).round().astype(int).tolist()
    rows.outputs += p.cold_output.draw(rng, count).round().astype(int).tolist()
    rows.previous += [-1] * count
    rows.shared += [0] * count
    rows.keeps += [False] * count
    rows.group += [-1] * count
    rows.gap_s += [0.0] * count
    rows.is_first += [True] * count


def _columns(rows: _Rows, systems: list[int], dropped: str) -> Workload:
    """Sorts by arrival and renumbers; a turn whose predecessor lies outside the window is warm.

    Its prompt then relates to the group's first request in the window, with which it shares the system
    prompt.
    """
    by_arrival = np.argsort(np.asarray(rows.at_s), kind="stable")
    order = by_arrival.tolist()
    position = [0] * len(order)
    for new, old in enumerate(order):
        position[old] = new
    opener: dict[int, int] = {}
    parents, shared_blocks, after = [], [], []
    warm: dict[int, int] = {}
    for new, old in enumerate(order):
        group, shared, before = rows.group[old], rows.shared[old], rows.previous[old]
        at = waits_for = position[before] if before >= 0 else -1
        if before < 0 and group >= 0:
            if not rows.is_first[old]:
                warm[new] = shared // BLOCK_TOKENS
            at, shared = opener.setdefault(group, new), min(shared, systems[group])
            at = at if at != new else -1
        after.append(waits_for)
        parents.append(at)
        shared_blocks.append(shared // BLOCK_TOKENS if at >= 0 else 0)
    return Workload(
        name="synthetic agent",
        block_tokens=BLOCK_TOKENS,
        arrival_s=_sorted(rows.at_s, by_arrival),
        input_tokens=_sorted(rows.inputs, by_arrival),
        output_tokens=_sorted(rows.outputs, by_arrival),
        parent=parents,
        shared_blocks=shared_blocks,
        keeps_output=[rows.keeps[old] and rows.previous[old] >= 0 for old in order],
        after=after,
        gap_s=_sorted(rows.gap_s, by_arrival),
        warm_blocks=warm,
        dropped=[dropped],
    )


def _sorted(column: list[Any], order: np.ndarray[Any, Any]) -> list[Any]:
    """The column in that order, its numbers made anew: they then lie side by side, as they are read."""
    result: list[Any] = np.asarray(column)[order].tolist()
    return result
