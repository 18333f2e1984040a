"""``pdd simulate``."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from pdd.core.units import format_bytes
from pdd.sim.commands.output import add_assumptions, print_json, print_table, progress_bar
from pdd.sim.commands.scenario_argument import Arguments, scenario_of
from pdd.sim.fleet import build_parts
from pdd.sim.report import Report
from pdd.sim.scenario import Scenario
from pdd.sim.simulate import load_workload, run_parts
from pdd.sim.workload.stream import build_paths


def run_simulate(arguments: Arguments) -> int:
    """The scenario has been played and its figures printed."""
    scenario = scenario_of(arguments)
    parts = build_parts(scenario)
    work = load_workload(scenario, requests=arguments.requests)
    paths = build_paths(work)
    end = work.arrival_s[-1]
    with progress_bar() as progress:
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
        print_json(figures)
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
    print_table(
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
    add_assumptions(report, scenario)
    return report
