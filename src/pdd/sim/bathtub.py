"""The hit-rate bathtub: revenue per prefill-second against hit rate, with tail chunks, and how to leave its
valley.

Owns the closed form and the chunk-level curve.

Source:
    Shape after Guz et al., "Many-core vs many-thread machines: stay away from the valley", IEEE CAL 2009;
    revenue ((1 - h) + d h) / T(h), T(h) = (1 - h)(1 + b (1 + h)) + e. Tail chunks: Sarathi-Serve (arXiv
    2403.02310).
"""

from dataclasses import dataclass

from pdd.core.errors import ConfigurationError
from pdd.sim.fleet import RoleModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BathtubPoint:
    """One hit rate.

    Args:
        hit_ratio: Of the prompt.
        prefill_s: Engine time of the uncached part.
        throughput: Prompt tokens (cached or not) served per engine-second.
        revenue: Price units per engine-second, a missed token costing 1.
        merged_revenue: The same if tail chunks were shared with other prompts (no floor, no tile loss).
    """

    hit_ratio: float
    prefill_s: float
    throughput: float
    revenue: float
    merged_revenue: float


def closed_form_revenue(hit_ratio: float, *, discount: float, attention_ratio: float, floor: float) -> float:
    """Revenue per prefill-second of the closed form; 1 at hit 0 without attention and floor."""
    time = (1 - hit_ratio) * (1 + attention_ratio * (1 + hit_ratio)) + floor
    return ((1 - hit_ratio) + discount * hit_ratio) / time


def bathtub(model: RoleModel, *, prompt_tokens: int, discount: float, steps: int = 200) -> list[BathtubPoint]:
    """The curve from hit 0 to just below 1 for one prompt length."""
    if not 0 <= discount <= 1:
        raise ConfigurationError(
            f"the price of a cached token is {discount:g} of a missed one; expected between 0 and 1"
        )
    chunk = model.section.chunk_tokens
    points = []
    for step in range(steps):
        hit = step / steps
        cached = round(prompt_tokens * hit)
        miss = max(1, prompt_tokens - cached)
        time_s = _prefill_s(model, miss, cached, chunk)
        merged_s = _merged_s(model, miss, cached, chunk)
        income = miss + discount * cached
        points.append(
            BathtubPoint(
                hit_ratio=hit,
                prefill_s=time_s,
                throughput=prompt_tokens / time_s,
                revenue=income / time_s,
                merged_revenue=income / merged_s,
            )
        )
    return points


def _prefill_s(model: RoleModel, miss: int, cached: int, chunk: int) -> float:
    total, done = 0.0, 0
    while done < miss:
        step = min(chunk, miss - done)
        total += model.chunk_s(step, cached + done)
        done += step
    return total


def _merged_s(model: RoleModel, miss: int, cached: int, chunk: int) -> float:
    """The tail as its share of a full chunk: what merging tails across requests reaches at best."""
    full = miss // chunk * chunk
    total = _prefill_s(model, full, cached, chunk) if full else 0.0
    tail = miss - full
    return total + (model.chunk_s(chunk, cached + full) * tail / chunk if tail else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Valley:
    """Where revenue is lowest, and how to leave.

    Args:
        hit_ratio, depth: Lowest point, and its revenue over that at hit 0.
        leaves_at: Hit from which revenue is back at its value for hit 0; None if never.
        is_tub: Whether revenue falls and rises again.
        dips: Hits of local minima at least ``DIP`` deep on both sides.
        merge_gain: What merging tail chunks brings at the lowest point.
        advice: In words.
    """

    hit_ratio: float
    depth: float
    leaves_at: float | None
    is_tub: bool
    dips: tuple[float, ...]
    merge_gain: float
    advice: str


DIP = 0.005
"""A local minimum counts from half a percent below its neighbours on both sides."""


def find_valley(points: list[BathtubPoint]) -> Valley:
    """The valley of a curve."""
    revenue = [point.revenue for point in points]
    lowest = min(range(len(points)), key=lambda index: (revenue[index], index))
    start = revenue[0]
    leaves = next(
        (points[index].hit_ratio for index in range(lowest, len(points)) if revenue[index] >= start), None
    )
    is_tub = 0 < lowest < len(points) - 1 and max(revenue[lowest:]) > revenue[lowest] * (1 + DIP)
    merge_gain = points[lowest].merged_revenue / points[lowest].revenue - 1
    return Valley(
        hit_ratio=points[lowest].hit_ratio,
        depth=revenue[lowest] / start,
        leaves_at=leaves,
        is_tub=is_tub,
        dips=_dips(points),
        merge_gain=merge_gain,
        advice=_advice(points[lowest].hit_ratio, leaves, is_tub, merge_gain),
    )


def _dips(points: list[BathtubPoint]) -> tuple[float, ...]:
    revenue = [point.revenue for point in points]
    dips = []
    for index in range(1, len(points) - 1):
        if revenue[index] <= revenue[index - 1] and revenue[index] < revenue[index + 1]:
            left, right = max(revenue[max(0, index - 8) : index]), max(revenue[index + 1 : index + 9])
            if min(left, right) > revenue[index] * (1 + DIP):
                dips.append(points[index].hit_ratio)
    return tuple(dips)


def _advice(lowest: float, leaves: float | None, is_tub: bool, merge_gain: float) -> str:
    if not is_tub:
        return (
            f"No valley: at this price of cached tokens revenue per engine-second falls all the way to "
            f"hit {lowest:.0%}. "
            f"Charge more for cached tokens, or merge tail chunks ({merge_gain:+.0%} there)."
        )
    climb = (
        f"get past hit {leaves:.0%} with more cache"
        if leaves is not None
        else "no hit rate earns as much as none; raise the price of cached tokens"
    )
    return (
        f"Lowest at hit {lowest:.0%}: {climb}; merging tail chunks across requests brings "
        f"{merge_gain:+.0%} at the bottom."
    )
