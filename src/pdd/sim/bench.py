"""How fast the simulator is, and how its time grows with the number of requests."""

import resource
import sys
import time
from collections.abc import Callable
from math import log
from typing import Any

from pdd.sim.fleet import build_parts
from pdd.sim.kernel import collector_off
from pdd.sim.run import FleetRun
from pdd.sim.scenario import Scenario
from pdd.sim.simulate import load_workload
from pdd.sim.workload.stream import build_paths


def bench_sizes(
    scenario: Scenario, sizes: tuple[int, ...], *, on_result: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Times of growing runs; the summary holds the largest, and the exponent of growth from the first to
    the last.

    Times are of generating the workload, building its prefix tree and the run itself, on one core.
    ``cpu_s`` is what this process used: on a busy machine it is the steadier figure.
    """
    results = []
    for size in sizes:
        result = _one(scenario, size)
        results.append(result)
        if on_result is not None:
            on_result(result)
    first, last = results[0], results[-1]
    exponent = (
        log(last["cpu_s"] / first["cpu_s"]) / log(last["requests"] / first["requests"])
        if last["requests"] > first["requests"]
        else 1.0
    )
    return {**last, "growth_exponent": exponent, "sizes": [result["requests"] for result in results]}


def _one(scenario: Scenario, size: int) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    with collector_off():
        work = load_workload(scenario, requests=size)
        paths = build_paths(work)
        generated = time.process_time()
        totals = FleetRun(build_parts(scenario), work, paths).run()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "requests": len(work),
        "engines": sum(
            role.engines
            for role in (scenario.fleet.prefill, scenario.fleet.relay, scenario.fleet.main)
            if role is not None
        ),
        "events": totals.events,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "workload_cpu_s": generated - cpu,
        "requests_per_s": len(work) / wall_s,
        "events_per_s": totals.events / wall_s,
        "us_per_request_cpu": cpu_s / len(work) * 1e6,
        "peak_rss_mb": peak / 1e6,
    }
