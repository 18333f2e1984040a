"""The simulator's subcommands: simulate, plan, feasible, bathtub, chips, and ``bench sim``.

Owns flags, progress and what is printed. ``add_subcommands`` and ``add_bench`` are called by the
``pdd`` command.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdd.core.errors import ConfigurationError
from pdd.core.units import format_bytes
from pdd.sim.bathtub import bathtub, find_valley
from pdd.sim.bench import bench_sizes
from pdd.sim.chips import load_chips, rate_chips
from pdd.sim.claims import QUICK, Claim
from pdd.sim.claims_fleet import collapse_claims, order_claims, planner_claims, sensitivity
from pdd.sim.claims_traces import compare_variants, drc_sizes
from pdd.sim.feasible import feasible
from pdd.sim.fleet import build_parts
from pdd.sim.plan import plan
from pdd.sim.report import Report, show
from pdd.sim.scenario import Scenario, load_scenario
from pdd.sim.simulate import load_workload, run_parts
from pdd.sim.workload.stream import build_paths

Arguments = argparse.Namespace
EXIT_MISSED = 1
SENSITIVITY: dict[str, dict[str, dict[str, Any]]] = {
    "as stated": {},
    "linear efficiency 0.4": {"efficiency": {"linear_ratio": 0.4}},
    "linear efficiency 0.6": {"efficiency": {"linear_ratio": 0.6}},
    "attention efficiency 0.3": {"efficiency": {"attention_ratio": 0.3}},
    "attention efficiency 0.7": {"efficiency": {"attention_ratio": 0.7}},
    "bandwidth efficiency 0.7": {"efficiency": {"bandwidth_ratio": 0.7}},
    "memory 0.85": {"efficiency": {"memory_ratio": 0.85}},
    "second token within 5 s": {"slo": {"ttft": 5.0, "second_token": 5.0}},
    "second token within 20 s": {"slo": {"ttft": 20.0, "second_token": 20.0}},
    "95 % within the SLO": {"slo": {"attainment_ratio": 0.95, "ttft": 20.0, "second_token": 20.0}},
    "30 ms per token": {"slo": {"tpot": 0.03}},
    "line of 50 Gbit/s": {"line": {"rate": 50e9 / 8}},
    "model qwen3-30b-a3b": {"model": {"config": "qwen3-30b-a3b"}},
}


def add_subcommands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The parser knows simulate, plan, feasible, bathtub and chips."""
    for name, handler, text in (
        ("simulate", run_simulate, "play a scenario's traffic through its fleet"),
        ("plan", run_plan, "search the fleet with the best benefit-cost ratio within the SLO"),
        (
            "feasible",
            run_feasible,
            "ask in seconds whether a line carries the traffic and a relay hides its latency",
        ),
    ):
        parser = subparsers.add_parser(name, help=text, description=text)
        _add_scenario(parser)
        parser.set_defaults(run=handler)
        if name == "simulate":
            parser.add_argument("--requests", type=_positive, help="override workload.requests")
        if name == "plan":
            parser.add_argument(
                "--sensitivity", action="store_true", help="also plan under each changed assumption (minutes)"
            )
    _add_bathtub(subparsers)
    _add_chips(subparsers)


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, help="scenario.toml")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one key",
    )
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a report with plots, one file")


def _add_bathtub(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "hit rate against throughput and revenue of prefill, and how to leave the valley"
    parser = subparsers.add_parser("bathtub", help=text, description=text)
    _add_scenario(parser)
    parser.add_argument(
        "--prompt-tokens", type=_positive, default=64_000, help="prompt length (default: 64000)"
    )
    parser.add_argument(
        "--cached-price",
        type=float,
        default=0.10,
        help="price of a cached token over a missed one (default: 0.10)",
    )
    parser.set_defaults(run=run_bathtub)


def _add_chips(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "compare chips in four dimensions and say which role each suits"
    parser = subparsers.add_parser("chips", help=text, description=text)
    parser.add_argument("--chips", type=Path, help="another table (TOML); default: the bundled one")
    parser.add_argument(
        "--reference", default="H100-SXM", help="chip the others are compared with (default: H100-SXM)"
    )
    _add_output(parser)
    parser.set_defaults(run=run_chips)


def add_bench(parts: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """``pdd bench`` knows the part ``sim``."""
    sim = parts.add_parser("sim", help="the simulator: speed, and what it must show")
    sim.add_argument(
        "scenario", type=Path, nargs="?", help="scenario.toml; needed for everything but the quick claims"
    )
    sim.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    sim.add_argument(
        "--sizes", type=_sizes, default=(10_000, 100_000, 1_000_000), help="requests, e.g. 10000,100000"
    )
    sim.add_argument(
        "--show",
        choices=(*QUICK, "claims", "order", "collapse", "planner", "variants", "drc"),
        help="show claims instead of speed: one group, or 'claims' for all quick ones",
    )
    sim.add_argument(
        "--rate", type=float, action="append", help="request rate of fleet claims; several for variants"
    )
    sim.add_argument("--requests", type=_positive, default=12_000, help="requests per run of fleet claims")
    sim.add_argument("--json", action="store_true", help="print JSON lines, the summary last")
    sim.set_defaults(run=run_bench)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("expected a number above zero")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _scenario(arguments: Arguments) -> Scenario:
    if arguments.scenario is None:
        raise ConfigurationError("this needs a scenario file: expected its path after 'bench sim'")
    return load_scenario(arguments.scenario, overrides=tuple(arguments.overrides))


# -- simulate


def run_simulate(arguments: Arguments) -> int:
    """The scenario has been played and its figures printed."""
    scenario = _scenario(arguments)
    parts = build_parts(scenario)
    work = load_workload(scenario, requests=arguments.requests)
    paths = build_paths(work)
    end = work.arrival_s[-1]
    with _progress() as progress:
        task = progress.add_task("simulating", total=end)
        figures = run_parts(
            parts,
            workload=work,
            paths=paths,
            on_progress=lambda at: progress.update(task, completed=min(at, end)),
        )
        progress.update(task, completed=end)
    if arguments.html:
        _simulate_report(scenario, figures).write(arguments.html)
    if arguments.json:
        _print_json(figures)
    else:
        _print_figures(scenario, figures)
    return 0


def _print_figures(scenario: Scenario, figures: Mapping[str, Any]) -> None:
    out = Console()
    out.print(
        f"[bold]{scenario.title or 'scenario'}[/bold]: {figures['architecture']}, {figures['requests']} "
        f"requests"
    )
    for text in figures["dropped"]:
        out.print(f"left out: {text}")
    out.print(
        f"goodput {figures['goodput_rps']:.2f} of {figures['offered_rps']:.2f} req/s offered "
        f"({figures['attainment']:.1%} within the SLO), "
        f"{figures['bcr']:.4f} req/s per unit of cost"
    )
    _print_table(
        ("time, s", "p50", "p90", "p99"),
        [
            (name, *(figures[key][p] for p in ("p50", "p90", "p99")))
            for name, key in (
                ("first token", "ttft_s"),
                ("second token", "second_token_s"),
                ("whole answer", "e2e_s"),
                ("per token", "tpot_s"),
            )
        ],
    )
    shares = {name: share for name, share in figures["pipeline_shares"].items() if share}
    out.print("pipelines: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    out.print(
        f"relayed {figures['relayed_share']:.1%}, RLD made {figures['rld_token_share']:.1%} of the tokens"
    )
    out.print(
        f"line: {format_bytes(figures['wan_bytes'])}, without DRC "
        f"{format_bytes(figures['wan_bytes_without_drc'])}; "
        f"mean hit at MD {figures['md_hit_mean']:.1%}; line used {figures['use']['line']:.0%}, P "
        f"{figures['use']['prefill']:.0%}"
    )


def _simulate_report(scenario: Scenario, figures: Mapping[str, Any]) -> Report:
    report = Report(scenario.title or "PDD simulation")
    report.paragraph(
        f"{figures['architecture']}: goodput {figures['goodput_rps']:.2f} req/s, cost "
        f"{figures['cost_per_hour']:.2f} an hour."
    )
    report.heading("Times")
    rows = [
        (key.removesuffix("_s"), *(figures[key][p] for p in ("p50", "p90", "p99")))
        for key in ("ttft_s", "second_token_s", "e2e_s")
    ]
    report.table(("seconds", "p50", "p90", "p99"), rows)
    report.curves(
        {
            key.removesuffix("_s"): [
                (50, figures[key]["p50"]),
                (90, figures[key]["p90"]),
                (99, figures[key]["p99"]),
            ]
            for key in ("ttft_s", "second_token_s")
        },
        x_label="percentile",
        y_label="seconds",
    )
    report.heading("Pipelines")
    report.bars(
        {name: share for name, share in figures["pipeline_shares"].items() if share},
        y_label="share of requests",
    )
    report.heading("Hits at MD")
    report.bars(figures["hit_bins"], y_label="share of requests")
    _assumptions(report, scenario)
    return report


def _assumptions(report: Report, scenario: Scenario) -> None:
    report.heading("Assumptions")
    report.table(("key", "value"), [(key, value) for key, value in _flat(scenario.model_dump())])


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for key, item in value.items():
        rows += _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else [(prefix + key, item)]
    return rows


# -- plan


def run_plan(arguments: Arguments) -> int:
    """The ranked fleets have been printed, each with what binds it."""
    scenario = _scenario(arguments)
    with _progress() as progress:
        task = progress.add_task("planning", total=scenario.plan.finalists + 6)

        def step(text: str) -> None:
            progress.update(task, advance=1, description=text)

        result = plan(scenario, on_progress=step)
        if arguments.sensitivity:
            progress.update(task, description="sensitivity")
            result["sensitivity"] = sensitivity(scenario, SENSITIVITY)
    if arguments.html:
        _plan_report(scenario, result).write(arguments.html)
    if arguments.json:
        _print_json(result)
        return 0
    print_out = Console().print
    print_out(
        f"{result['candidates']} fleets screened, {result['simulated']} simulated; screened rates are "
        f"optimistic"
    )
    _print_table(PLAN_HEADER, _plan_rows(result))
    for base in result["baselines"]:
        print_out(
            f"baseline: {base['prefill']} P + {base['main']} D on {base['chip']} in one datacenter: "
            f"{base['goodput_rps']:.2f} req/s, "
            f"BCR {base['bcr']:.4f}, bound by {base['binding']}"
        )
    if "sensitivity" in result:
        _print_table(tuple(result["sensitivity"][0]), [tuple(row.values()) for row in result["sensitivity"]])
    return 0


PLAN_HEADER = ("P", "RLD", "MD", "Gbit/s", "cost", "screened req/s", "goodput req/s", "BCR", "gain", "binds")


def _plan_rows(result: Mapping[str, Any], *, most: int = 12) -> list[tuple[object, ...]]:
    keys = (
        "prefill",
        "relay",
        "main",
        "line_gbit_per_s",
        "cost",
        "screened_rps",
        "goodput_rps",
        "bcr",
        "bcr_gain",
        "binding",
    )
    return [tuple(fleet[key] for key in keys) for fleet in result["fleets"][:most]]


def _plan_report(scenario: Scenario, result: Mapping[str, Any]) -> Report:
    report = Report(f"Plan: {scenario.title or 'PDD'}")
    report.paragraph(f"{result['candidates']} fleets screened, {result['simulated']} simulated.")
    report.heading("Fleets")
    report.table(PLAN_HEADER, _plan_rows(result))
    bars = {
        f"{f['prefill']}+{f['relay']}+{f['main']}": f["bcr"]
        for f in result["fleets"]
        if f["goodput_rps"] is not None
    }
    for base in result["baselines"]:
        bars["one site"] = base["bcr"]
    report.bars(bars, y_label="goodput per unit of cost (P + RLD + MD)")
    if result["baselines"]:
        report.heading("Baseline")
        base = {key: value for key, value in result["baselines"][0].items() if not isinstance(value, dict)}
        report.table(tuple(base), [tuple(base.values())])
    if "sensitivity" in result:
        report.heading("Sensitivity")
        report.table(tuple(result["sensitivity"][0]), [tuple(row.values()) for row in result["sensitivity"]])
    _assumptions(report, scenario)
    return report


# -- feasible, bathtub, chips


def run_feasible(arguments: Arguments) -> int:
    """Both questions have been answered."""
    scenario = _scenario(arguments)
    result = feasible(scenario)
    if arguments.html:
        report = Report(f"Feasibility: {scenario.title or 'PDD'}")
        report.paragraph(result["verdict"])
        for section in ("bandwidth", "latency"):
            report.heading(section)
            report.table(("what", "value"), list(result[section].items()))
        use = {
            key: result["bandwidth"][key]
            for key in ("without_drc_gbit_per_s", "with_drc_gbit_per_s", "line_gbit_per_s")
        }
        report.bars(use, y_label="Gbit/s")
        _assumptions(report, scenario)
        report.write(arguments.html)
    if arguments.json:
        _print_json(result)
        return 0
    for section in ("bandwidth", "latency"):
        _print_table((section, ""), list(result[section].items()))
    Console().print(
        f"{result['verdict']}; screened rate {result['carried_rps_screened']:.2f} req/s, bound by "
        f"{result['binding']}"
    )
    return 0


def run_bathtub(arguments: Arguments) -> int:
    """The curve has been computed and its valley named."""
    scenario = _scenario(arguments)
    model = build_parts(scenario).role(scenario.fleet.prefill, "prefill")
    points = bathtub(model, prompt_tokens=arguments.prompt_tokens, discount=arguments.cached_price)
    valley = find_valley(points)
    if arguments.html:
        report = Report("The hit-rate bathtub")
        report.paragraph(valley.advice)
        report.curves(
            {
                "revenue": [(point.hit_ratio, point.revenue) for point in points],
                "tail chunks merged": [(point.hit_ratio, point.merged_revenue) for point in points],
            },
            x_label="hit ratio",
            y_label="revenue per engine-second (missed token = 1)",
        )
        report.curves(
            {"prompt tokens/s": [(p.hit_ratio, p.throughput) for p in points]},
            x_label="hit ratio",
            y_label="tokens/s",
        )
        _assumptions(report, scenario)
        report.write(arguments.html)
    if arguments.json:
        _print_json({"valley": asdict(valley), "points": [asdict(point) for point in points]})
        return 0
    _print_table(
        ("hit", "prefill s", "tokens/s", "revenue/s", "merged"),
        [
            (p.hit_ratio, p.prefill_s, p.throughput, p.revenue, p.merged_revenue)
            for p in points[:: len(points) // 20]
        ],
    )
    Console().print(valley.advice)
    if valley.dips:
        Console().print("dips of tail chunks at hit " + ", ".join(f"{dip:.0%}" for dip in valley.dips))
    return 0


def run_chips(arguments: Arguments) -> int:
    """The table of chips has been printed with each one's role."""
    ratings = rate_chips(load_chips(arguments.chips), reference=arguments.reference)
    header = (
        "chip",
        "compute",
        "memory",
        "bandwidth",
        "link",
        "FLOP/B",
        "PF/s/$",
        "TB/s/$",
        "price/h",
        "role",
    )
    rows = [
        (
            r.chip.name,
            r.compute_ratio,
            r.capacity_ratio,
            r.bandwidth_ratio,
            r.link_ratio,
            r.flops_per_byte,
            r.prefill_value,
            r.decode_value,
            r.chip.price_per_hour,
            r.role,
        )
        for r in ratings
    ]
    if arguments.html:
        report = Report("Chips for prefill and decode")
        report.table(
            (*header, "why", "source"),
            [(*row, r.reason, r.chip.source) for row, r in zip(rows, ratings, strict=True)],
        )
        report.bars({r.chip.name: r.flops_per_byte for r in ratings}, y_label="FLOP per byte")
        report.write(arguments.html)
    if arguments.json:
        _print_json({"reference": arguments.reference, "chips": [asdict(rating) for rating in ratings]})
        return 0
    _print_table(header, rows)
    return 0


# -- bench


def run_bench(arguments: Arguments) -> int:
    """Speed has been measured, or claims shown; 1 if a claim misses."""
    if arguments.show is None:
        emit = _print_json if arguments.json else _print_row
        summary = bench_sizes(_scenario(arguments), arguments.sizes, on_result=emit)
        emit(summary)
        return 0
    if arguments.show in ("variants", "drc"):
        return _show_rows(arguments)
    claims = _claims(arguments)
    for claim in claims:
        if arguments.json:
            _print_json({**asdict(claim), "holds": claim.holds})
    missed = [claim for claim in claims if not claim.holds]
    if arguments.json:
        _print_json({"claims": len(claims), "missed": [claim.id for claim in missed]})
    else:
        _print_table(
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
    scenario = _scenario(arguments)
    rate = (arguments.rate or [scenario.workload.rate_per_s or 8.0])[0]
    if name == "planner":
        return planner_claims(scenario)
    make: Callable[..., list[Claim]] = order_claims if name == "order" else collapse_claims
    return make(scenario, rate_per_s=rate, requests=arguments.requests)


def _show_rows(arguments: Arguments) -> int:
    scenario = _scenario(arguments)
    rates = tuple(arguments.rate or [scenario.workload.rate_per_s or 8.0])
    if arguments.show == "variants":
        rows = list(
            compare_variants(scenario, rates_per_s=rates, requests=arguments.requests, on_progress=_say)
        )
    else:
        sizes = (2e12, 1e12, 5e11, 2.5e11, 1.25e11, 6e10, 3e10)
        rows = list(
            drc_sizes(
                scenario,
                sizes_bytes=sizes,
                rate_per_s=rates[0],
                requests=arguments.requests,
                on_progress=_say,
            )
        )
    if arguments.json:
        for row in rows:
            _print_json(row)
        return 0
    plain = [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in rows]
    _print_table(tuple(plain[0]), [tuple(row.values()) for row in plain])
    return 0


# -- printing


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _say(text: str) -> None:
    Console(stderr=True).print(text, style="dim")


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _print_row(row: Mapping[str, object]) -> None:
    _print_table(tuple(row), [tuple(row.values())])


def _print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table()
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if not index else "right", overflow="fold")
    for row in rows:
        table.add_row(*(show(cell) for cell in row))
    Console().print(table)
