"""A generator of agent traffic with stated parameters, and a plain one for queueing checks.

Owns the session process: system prompts shared by group, turns that append, breaks, compactions, resets after a human's
gap, and cold one-shot prompts. The defaults were fitted to public agent traces (``docs/explanation/simulator.md``).
"""

import math
import random
from dataclasses import dataclass

from pdd.sim.workload.agent import BLOCK_TOKENS
from pdd.sim.workload.stream import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Lognormal of a median and log-sigma, clipped to a range."""

    median: float
    sigma: float
    low: float
    high: float

    def draw(self, rng: random.Random) -> float:
        """One value."""
        value = self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        return self.low if value < self.low else self.high if value > self.high else value


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

Row = tuple[float, int, int, int, int, int, int, float]
"""Arrival, serial of the row, input, output, serial of the parent or -1, shared tokens, group or -1, gap after the parent."""


def generate_agent_workload(
    *, requests: int, rate_per_s: float, seed: int, parameters: AgentParameters | None = None
) -> Workload:
    """Agent traffic in steady state: sessions that began before the window opens are in it with their later turns.

    Args:
        requests: Expected number inside the window.
        rate_per_s: Mean request rate.
        seed: Same seed, same workload.
        parameters: Default: the fitted ones.
    """
    p = parameters or AgentParameters()
    rng = random.Random(seed)
    systems = [round(p.system.draw(rng)) for _ in range(p.groups)]
    zipf = [1 / (rank + 1) for rank in range(p.groups)]
    span_s = requests / rate_per_s
    # Turns per session from the clipped lognormal, by sampling: there is no short closed form.
    mean_turns = sum(p.turns.draw(rng) for _ in range(20_000)) / 20_000
    sessions = max(1, round(rate_per_s * (1 - p.cold_ratio) / mean_turns * (span_s + LEAD_S)))
    rows: list[Row] = []
    groups = rng.choices(range(p.groups), weights=zipf, k=sessions)
    for group in groups:
        _session(rows, rng, p, rng.uniform(-LEAD_S, span_s), span_s, group, systems[group])
    for _ in range(round(requests * p.cold_ratio)):
        rows.append((rng.uniform(0, span_s), len(rows), round(p.cold_input.draw(rng)), round(p.cold_output.draw(rng)), -1, 0, -1, 0.0))
    return _columns(rows, span_s, systems)


def _session(
    rows: list[Row], rng: random.Random, p: AgentParameters, begin_s: float, end_s: float, group: int, system: int
) -> None:
    gauss, uniform, exp = rng.gauss, rng.random, math.exp
    turns = round(p.turns.draw(rng))
    length = system + round(p.first.draw(rng))
    output_mu, output_sigma = math.log(p.output.median), p.output.sigma
    append_mu, append_sigma = math.log(p.append.median), p.append.sigma
    at, parent, shared, gap = begin_s, -1, system, 0.0
    for _ in range(turns):
        if at >= end_s:
            break
        output = int(exp(output_mu + output_sigma * gauss(0.0, 1.0)))
        output = 16 if output < 16 else 16_000 if output > 16_000 else output
        serial = len(rows)
        rows.append((at, serial, length, output, parent, shared, group, gap))
        human = uniform() < p.human_ratio
        gap = (p.human_gap if human else p.tool_gap).draw(rng)
        at += gap + p.service_base_s + output / p.service_tokens_per_s
        if uniform() < p.big_append_ratio:
            appended = round(p.big_append.draw(rng))
        else:
            appended = int(exp(append_mu + append_sigma * gauss(0.0, 1.0)))
            appended = 10 if appended < 10 else 30_000 if appended > 30_000 else appended
        parent = serial
        before = length
        length += output + appended
        if human and uniform() < p.reset_ratio:
            shared = system
        elif uniform() < p.break_ratio:
            shared = int(system + uniform() * (before - system))
        else:
            shared = before
        if length > p.compact_above_tokens:
            length = system + round(p.compact_to.draw(rng))
            shared = system


def _columns(rows: list[Row], span_s: float, systems: list[int]) -> Workload:
    """Sorts by arrival and renumbers parents; turns before the window stay as content but are not requested.

    A prompt whose predecessors all lie outside the window shares its system prompt with the group's first request.
    """
    inside = sorted(row for row in rows if 0 <= row[0] < span_s)
    position = [-1] * len(rows)
    opener: dict[int, int] = {}
    for index, row in enumerate(inside):
        position[row[1]] = index
        opener.setdefault(row[6], index)
    parents, shared_blocks, keeps, after = [], [], [], []
    warm: dict[int, int] = {}
    for index, row in enumerate(inside):
        parent, shared, group = row[4], row[5], row[6]
        at = position[parent] if parent >= 0 else -1
        after.append(at)
        keeps.append(at >= 0 and shared >= rows[parent][2])
        if parent >= 0 and at < 0:
            warm[index] = shared // BLOCK_TOKENS
        if at < 0 and group >= 0 and opener[group] < index:
            at, shared = opener[group], min(shared, systems[group])
        parents.append(at)
        shared_blocks.append(shared // BLOCK_TOKENS if at >= 0 else 0)
    return Workload(
        name="synthetic agent",
        block_tokens=BLOCK_TOKENS,
        arrival_s=[row[0] for row in inside],
        input_tokens=[row[2] for row in inside],
        output_tokens=[row[3] for row in inside],
        parent=parents,
        shared_blocks=shared_blocks,
        keeps_output=keeps,
        after=after,
        gap_s=[row[7] for row in inside],
        warm_blocks=warm,
        dropped=[f"{len(rows) - len(inside)} turns outside the window (before it opens or after it closes)"],
    )
