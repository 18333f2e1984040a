"""What the simulator's commands print: tables, JSON lines, progress, and the assumptions of a report."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdd.sim.report import Report, show
from pdd.sim.scenario import Scenario


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def say(text: str) -> None:
    Console(stderr=True).print(text, style="dim")


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def print_row(row: Mapping[str, object]) -> None:
    print_table(tuple(row), [tuple(row.values())])


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table()
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if not index else "right", overflow="fold")
    for row in rows:
        table.add_row(*(show(cell) for cell in row))
    Console().print(table)


def add_assumptions(report: Report, scenario: Scenario) -> None:
    report.heading("Assumptions")
    report.table(("key", "value"), [(key, value) for key, value in _flat(scenario.model_dump())])


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for key, item in value.items():
        rows += _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else [(prefix + key, item)]
    return rows
