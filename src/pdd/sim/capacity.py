"""The highest rate a fleet carries within the SLO, by simulation.

Owns the search: rates are bisected between one that is carried and one that is not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdd.sim.fleet import Parts
from pdd.sim.simulate import load_workload, run_parts
from pdd.sim.workload.stream import Paths, Workload, build_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What the search found.

    Args:
        rate_rps: Highest tried rate with enough requests within the SLO; 0 if none was.
        goodput_rps: Good requests per second at that rate.
        figures: The run at that rate (or at the lowest tried).
        failing: The run at the lowest rate that was too much: what broke first.
    """

    rate_rps: float
    goodput_rps: float
    figures: dict[str, Any]
    failing: dict[str, Any] | None


class WorkloadCache:
    """Workloads by rate, so that fleets are compared on the same requests."""

    def __init__(self, parts: Parts, requests: int) -> None:
        self._parts, self._requests = parts, requests
        self._made: dict[float, tuple[Workload, Paths]] = {}

    def at(self, rate_rps: float) -> tuple[Workload, Paths]:
        """The workload at a rate."""
        if rate_rps not in self._made:
            work = load_workload(self._parts.scenario, rate_per_s=rate_rps, requests=self._requests)
            self._made[rate_rps] = work, build_paths(work)
        return self._made[rate_rps]


STEP_RATIO = 1.04
"""Rates are tried on one grid, so that fleets share workloads; it is also the precision of the result."""


def find_capacity(
    parts: Parts,
    *,
    guess_rps: float,
    workloads: WorkloadCache,
    on_run: Callable[[float], None] | None = None,
    max_runs: int = 12,
) -> Carried:
    """Climbs or descends the grid of rates from a guess until the SLO's border is found."""
    target = parts.scenario.slo.attainment_ratio
    results: dict[int, dict[str, Any]] = {}

    def attains(exponent: int) -> bool:
        if exponent not in results:
            rate = STEP_RATIO**exponent
            work, paths = workloads.at(rate)
            results[exponent] = run_parts(parts, workload=work, paths=paths)
            if on_run is not None:
                on_run(rate)
        return bool(results[exponent]["attainment"] >= target)

    low, high = _bracket(_exponent(guess_rps), attains, max_runs)
    if low is None:
        worst = min(results)
        return Carried(rate_rps=0.0, goodput_rps=0.0, figures=results[worst], failing=results[worst])
    figures = results[low]
    return Carried(
        rate_rps=STEP_RATIO**low,
        goodput_rps=figures["goodput_rps"],
        figures=figures,
        failing=results.get(high) if high else None,
    )


def _exponent(rate_rps: float) -> int:
    exponent = 0
    while STEP_RATIO**exponent < rate_rps:
        exponent += 1
    while STEP_RATIO**exponent > rate_rps:
        exponent -= 1
    return exponent


def _bracket(start: int, attains: Callable[[int], bool], max_runs: int) -> tuple[int | None, int | None]:
    """``(highest attained, lowest missed)`` exponents, neighbours unless the runs are used up."""
    low: int | None = None
    high: int | None = None
    at, stride = start, 4
    for _ in range(max_runs):
        if attains(at):
            low = at
        else:
            high = at
        if low is None:
            at -= stride
            stride *= 2
        elif high is None:
            at += stride
        elif high - low <= 1:
            break
        else:
            at = (low + high) // 2
    return low, high
