"""A run is a function of scenario, workload and seed, whatever is tuned."""

from pathlib import Path
from typing import Any

import pytest

from pdd.sim.fleet import build_parts
from pdd.sim.run import FleetRun
from pdd.sim.scenario_file import load_scenario
from pdd.sim.simulate import load_workload, simulate
from pdd.sim.workload.stream import build_paths

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"
PINNED = {
    "p99": 27.772392045224144,
    "wan_bytes": 816546756153.143,
    "rld_token_share": 0.005564106496198576,
    "md_hit_mean": 0.9058391340655929,
}
SHORT = ("workload.rate_per_s=8", "workload.requests=1500")


def _figures(*overrides: str) -> dict[str, Any]:
    return simulate(load_scenario(SCENARIOS / "paper.toml", overrides=SHORT + overrides))


def test_the_same_seed_gives_the_same_outcome_of_every_request() -> None:
    scenario = load_scenario(SCENARIOS / "paper.toml", overrides=SHORT)
    outcomes = []
    for _ in range(2):
        work = load_workload(scenario)
        run = FleetRun(build_parts(scenario), work, build_paths(work))
        run.run()
        outcomes.append(run.outcome)
    assert outcomes[0] == outcomes[1]
    assert _figures() != _figures("seed=2")


def test_tuning_has_not_changed_what_a_run_shows() -> None:
    """Figures of the first, slower version of the run; rounding may differ between machines."""
    figures = _figures()
    assert figures["second_token_s"]["p99"] == pytest.approx(PINNED["p99"], rel=1e-6)
    assert figures["wan_bytes"] == pytest.approx(PINNED["wan_bytes"], rel=1e-6)
    assert figures["rld_token_share"] == pytest.approx(PINNED["rld_token_share"], rel=1e-6)
    assert figures["md_hit_mean"] == pytest.approx(PINNED["md_hit_mean"], rel=1e-6)


def test_relays_on_prefill_engines_slow_both_and_cost_nothing() -> None:
    shared = _figures("fleet.relay_shares_prefill=true", 'line.rate="10gbit"')
    apart = _figures('line.rate="10gbit"')
    assert shared["cost_per_hour"] == pytest.approx(apart["cost_per_hour"] - 3.0)
    assert shared["relayed_share"] > apart["relayed_share"]  # 40 engines relay more than 3
    assert shared["use"]["prefill"] > apart["use"]["prefill"]
    assert shared["tpot_s"]["p99"] > apart["tpot_s"]["p99"]
    counts = shared["conservation"]
    assert counts["arrivals"] == counts["done"] + counts["rejected"] + counts["in_flight"]
