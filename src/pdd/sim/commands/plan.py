"""``pdd plan``, and the assumptions it can change one at a time."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from pdd.sim.claims_fleet import sensitivity
from pdd.sim.commands.output import add_assumptions, print_json, print_table, progress_bar
from pdd.sim.commands.scenario_argument import Arguments, scenario_of
from pdd.sim.plan import plan
from pdd.sim.report import Report
from pdd.sim.scenario import Scenario

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


def run_plan(arguments: Arguments) -> int:
    """The ranked fleets have been printed, each with what binds it."""
    scenario = scenario_of(arguments)
    with progress_bar() as progress:
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
        print_json(result)
        return 0
    print_out = Console().print
    print_out(
        f"{result['candidates']} fleets screened, {result['simulated']} simulated; screened rates are "
        f"optimistic"
    )
    print_table(PLAN_HEADER, _plan_rows(result))
    for base in result["baselines"]:
        print_out(
            f"baseline: {base['prefill']} P + {base['main']} D on {base['chip']} in one datacenter: "
            f"{base['goodput_rps']:.2f} req/s, "
            f"BCR {base['bcr']:.4f}, bound by {base['binding']}"
        )
    if "sensitivity" in result:
        print_table(tuple(result["sensitivity"][0]), [tuple(row.values()) for row in result["sensitivity"]])
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
    add_assumptions(report, scenario)
    return report
