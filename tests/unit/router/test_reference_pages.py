"""The pages about the router say what the code does."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

from prometheus_client.metrics_core import Metric

from pdd.policy import pipeline
from pdd.policy.replay import POLICIES
from pdd.router.api.errors import STATUS
from pdd.router.metrics import RouterMetrics
from pdd.router.records import Record
from pdd.router.request.machine.attempts import MAX_ATTEMPTS
from pdd.router.request.machine.state import Phase

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = (DOCS / "reference" / "router.md").read_text(encoding="utf-8")
HANDOFF_POLICIES = ("Which pipeline", "Outliers", "One-shot or catch-up", "What cannot move")
HANDOFF = (DOCS / "explanation" / "handoff.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    """The text of one section of the reference."""
    return REFERENCE.split(f"\n## {name}\n")[1].split("\n## ")[0]


def names(text: str) -> set[str]:
    """Everything in code style in the first column of the text's table."""
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def documented_name(metric: Metric) -> str:
    """A metric's name as it is scraped."""
    return metric.name + "_total" if metric.type == "counter" else metric.name


def test_every_metric_is_documented_and_nothing_else() -> None:
    metrics = list(RouterMetrics().registry.collect())
    assert names(section("Metrics")) == {documented_name(metric) for metric in metrics}


def test_every_metric_has_its_labels_and_advice() -> None:
    labels = {documented_name(m): set(m.samples[0].labels) for m in moved().registry.collect() if m.samples}
    for line in section("Metrics").splitlines():
        if line.startswith("| `"):
            _, name, label_names, advice, _ = re.split(r"\s*\|\s*", line)
            assert len(advice) > 10
            assert set(re.findall(r"`([^`]+)`", label_names)) == labels[name.strip("`")] - {"le"}


def moved() -> RouterMetrics:
    """Metrics with one sample of everything, so that their labels can be seen."""
    metrics = RouterMetrics()
    for metric in vars(metrics).values():
        if names_of_labels := getattr(metric, "_labelnames", ()):
            metric.labels(*names_of_labels)
    return metrics


def test_every_field_of_a_record_is_documented() -> None:
    assert names(section("Records")) == {field.name for field in fields(Record)} - {"arrived_s"}


def test_every_reason_is_documented() -> None:
    documented = {name.removesuffix(":...") for name in names(section("Reasons"))} - {"x-pdd-reason"}
    assert documented == set(pipeline.Reason.__args__)  # type: ignore[attr-defined]


def test_every_status_is_documented() -> None:
    table = section("Errors")
    for _, status, kind in STATUS:
        assert f"| {status} | `{kind}` |" in table


def test_the_diagram_is_the_state_machines() -> None:
    path = DOCS.parent / "tools" / "state_diagram.py"
    spec = importlib.util.spec_from_file_location("state_diagram", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.render(HANDOFF) == HANDOFF, "run tools/state_diagram.py"
    for phase in Phase:
        assert f"    {phase.value.replace(' ', '_')} --> " in HANDOFF
        assert f"| {phase.value} |" in HANDOFF
    assert MAX_ATTEMPTS == 6
    assert "at most six times" in HANDOFF


def test_every_policy_has_its_formula_and_an_example_where_the_table_says() -> None:
    pages = {
        "The door": section("The door"),
        "Where a request goes": section("Where a request goes"),
        **{title: HANDOFF.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in HANDOFF_POLICIES},
    }
    for title, text in pages.items():
        assert "Formula: `" in text or "```\n" in text, title
        assert "Example: " in text, title
    assert names(section("Decisions")) - {"policy"} == set(POLICIES)
