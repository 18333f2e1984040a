"""From a scenario to a result: loads the workload, runs it, measures it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdd.sim.fleet import Parts, build_parts
from pdd.sim.metrics import measure
from pdd.sim.run import FleetRun
from pdd.sim.scenario import Scenario
from pdd.sim.workload.agent import load_agent_trace
from pdd.sim.workload.azure import load_azure_trace
from pdd.sim.workload.mooncake import load_mooncake_trace
from pdd.sim.workload.stream import Paths, Workload, build_paths
from pdd.sim.workload.synthetic import generate_agent_workload

DEFAULT_REQUESTS = 20_000


def load_workload(
    scenario: Scenario, *, rate_per_s: float | None = None, requests: int | None = None
) -> Workload:
    """The scenario's workload, at another rate or length if given."""
    section = scenario.workload
    rate = rate_per_s if rate_per_s is not None else section.rate_per_s
    count = requests or section.requests
    if section.kind == "synthetic-agent":
        assert rate is not None
        work = generate_agent_workload(
            requests=count or DEFAULT_REQUESTS, rate_per_s=rate, seed=scenario.seed
        )
        work.check("synthetic workload")
        return work
    path = Path(section.path)
    if section.kind == "agent-trace":
        return load_agent_trace(path, seed=scenario.seed, rate_per_s=rate, requests=count)
    if section.kind == "mooncake":
        return load_mooncake_trace(path, rate_per_s=rate, requests=count)
    return load_azure_trace(path, rate_per_s=rate, requests=count)


def simulate(
    scenario: Scenario,
    *,
    workload: Workload | None = None,
    paths: Paths | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """All figures of one run of a scenario; a given workload is used as it is."""
    return run_parts(build_parts(scenario), workload=workload, paths=paths, on_progress=on_progress)


def run_parts(
    parts: Parts,
    *,
    workload: Workload | None = None,
    paths: Paths | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """As ``simulate``, from parts already derived."""
    work = workload if workload is not None else load_workload(parts.scenario)
    run = FleetRun(parts, work, paths if paths is not None else build_paths(work))
    totals = run.run(on_progress=on_progress)
    return measure(parts, work, run.outcome, totals, arrival_s=run.actual_arrival_s)
