"""Our simulator beside a public one, on the same trace of arrivals and lengths.

Usage: ``python bench/compare_simulators.py TRACE.csv [REQUESTS]``, Azure's CSV, after installing sched-sim.
The two model different things: sched-sim steps one replica token by token, ours advances decode as a
fluid and plays a fleet. The figure compared is requests simulated per CPU second.
"""

import sys
import time
from pathlib import Path

from pdd.sim.fleet import build_parts
from pdd.sim.run import FleetRun
from pdd.sim.scenario_file import parse_scenario
from pdd.sim.workload.azure import load_azure_trace
from pdd.sim.workload.stream import Workload, build_paths

VALUES = {
    "model": {"config": "smollm2-135m"},
    "workload": {"kind": "azure", "path": "trace"},
    "slo": {"ttft": 5.0, "second_token": 5.0, "tpot": 0.05},
    "fleet": {
        "architecture": "one-site",
        "prefill": {"chip": "A100-SXM", "engines": 1},
        "main": {"chip": "A100-SXM", "engines": 1},
    },
}


def ours(work: Workload) -> float:
    """CPU seconds of our run, one prefill and one decode engine."""
    begin = time.process_time()
    run = FleetRun(build_parts(parse_scenario(VALUES, source="here", base=Path())), work, build_paths(work))
    totals = run.run()
    assert totals.num_done + totals.num_in_flight + totals.num_rejected == len(work)
    return time.process_time() - begin


def theirs(work: Workload) -> float:
    """CPU seconds of sched-sim's disaggregated scheduler on one A100."""
    from sched_sim.core.event_engine import Simulator  # installed by hand
    from sched_sim.core.request import Request
    from sched_sim.hardware.presets import get_hardware_profile
    from sched_sim.schedulers.factory import create_scheduler

    requests = [
        Request(request_id=str(row), arrived_at=at, prompt_tokens=tokens, output_tokens=out)
        for row, (at, tokens, out) in enumerate(
            zip(work.arrival_s, work.input_tokens, work.output_tokens, strict=True)
        )
    ]
    hardware = get_hardware_profile("a100")
    begin = time.process_time()
    simulator = Simulator(hardware, create_scheduler("disaggregated", hardware))
    simulator.submit_workload(requests)
    simulator.run()
    return time.process_time() - begin


def main() -> None:
    """Prints both rates."""
    work = load_azure_trace(
        Path(sys.argv[1]), rate_per_s=None, requests=int(sys.argv[2]) if len(sys.argv) > 2 else 2_000
    )
    for name, run in (("pdd", ours), ("sched-sim", theirs)):
        seconds = run(work)
        print(f"{name}: {len(work)} requests in {seconds:.2f} CPU s, {len(work) / seconds:.0f} per CPU s")


if __name__ == "__main__":
    main()
