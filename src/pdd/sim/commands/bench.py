"""``pdd bench sim``: the simulator's speed, and what it must show."""

from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console

from pdd.sim.bench import bench_sizes
from pdd.sim.claims import QUICK, Claim
from pdd.sim.claims_fleet import collapse_claims, order_claims, planner_claims
from pdd.sim.claims_traces import compare_variants, drc_sizes
from pdd.sim.commands.output import print_json, print_row, print_table, say
from pdd.sim.commands.scenario_argument import Arguments, scenario_of

EXIT_MISSED = 1


def run_bench(arguments: Arguments) -> int:
    """Speed has been measured, or claims shown; 1 if a claim misses."""
    if arguments.show is None:
        emit = print_json if arguments.json else print_row
        summary = bench_sizes(scenario_of(arguments), arguments.sizes, on_result=emit)
        emit(summary)
        return 0
    if arguments.show in ("variants", "drc"):
        return _show_rows(arguments)
    claims = _claims(arguments)
    for claim in claims:
        if arguments.json:
            print_json({**asdict(claim), "holds": claim.holds})
    missed = [claim for claim in claims if not claim.holds]
    if arguments.json:
        print_json({"claims": len(claims), "missed": [claim.id for claim in missed]})
    else:
        print_table(
            ("claim", "expected", "measured", "holds", "note"),
            [(c.what, c.expected, c.measured, c.holds, c.note) for c in claims],
        )
        Console().print(f"{len(claims) - len(missed)} of {len(claims)} hold")
    return EXIT_MISSED if missed else 0


def _claims(arguments: Arguments) -> list[Claim]:
    name = arguments.show
    if name in QUICK:
        return list(QUICK[name]())
    if name == "claims":
        return [claim for make in QUICK.values() for claim in make()]
    scenario = scenario_of(arguments)
    rate = (arguments.rate or [scenario.workload.rate_per_s or 8.0])[0]
    if name == "planner":
        return planner_claims(scenario)
    make: Callable[..., list[Claim]] = order_claims if name == "order" else collapse_claims
    return make(scenario, rate_per_s=rate, requests=arguments.requests)


def _show_rows(arguments: Arguments) -> int:
    scenario = scenario_of(arguments)
    rates = tuple(arguments.rate or [scenario.workload.rate_per_s or 8.0])
    if arguments.show == "variants":
        rows = list(
            compare_variants(scenario, rates_per_s=rates, requests=arguments.requests, on_progress=say)
        )
    else:
        sizes = (2e12, 1e12, 5e11, 2.5e11, 1.25e11, 6e10, 3e10)
        rows = list(
            drc_sizes(
                scenario,
                sizes_bytes=sizes,
                rate_per_s=rates[0],
                requests=arguments.requests,
                on_progress=say,
            )
        )
    if arguments.json:
        for row in rows:
            print_json(row)
        return 0
    plain = [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in rows]
    print_table(tuple(plain[0]), [tuple(row.values()) for row in plain])
    return 0
