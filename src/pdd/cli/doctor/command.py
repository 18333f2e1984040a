"""``pdd doctor``: asks, judges, prints; 0 if nothing is wrong, 1 if something is."""

import argparse
import asyncio
import dataclasses
import datetime
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from pdd.cli.doctor.facts import gather_facts
from pdd.cli.doctor.findings import Finding, examine
from pdd.cli.options import add_config, read_config
from pdd.core.errors import ConfigurationError

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers

_STYLE: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def add_parser(commands: "Subparsers") -> None:
    """``pdd doctor`` exists."""
    parser = commands.add_parser(
        "doctor",
        help="find what is wrong with a deployment",
        description=(
            "Check the configuration, every engine, agent and port it names, whether engines' KV means the "
            "same pairwise, and the certificates that are on this host. Changes nothing. Exit status 1 if "
            "something is wrong; warnings alone give 0."
        ),
    )
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    findings = diagnose(arguments)
    is_healthy = not any(finding.verdict == "fail" for finding in findings)
    if arguments.json:
        print(
            json.dumps(
                {"healthy": is_healthy, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2
            )
        )
    else:
        _print_table(findings)
    return 0 if is_healthy else 1


def diagnose(arguments: argparse.Namespace) -> list[Finding]:
    """All findings about the configuration that ``--config`` names."""
    try:
        config = read_config(arguments)
    except ConfigurationError as error:
        return [Finding(check="config", subject=str(arguments.config), verdict="fail", detail=str(error))]
    facts = asyncio.run(gather_facts(config))
    good = Finding(check="config", subject=str(arguments.config), verdict="ok")
    return [good, *examine(config, facts, now=datetime.datetime.now(datetime.UTC))]


def _print_table(findings: Sequence[Finding]) -> None:
    table = Table("check", "of", "", "detail", box=None, pad_edge=False)
    for finding in findings:
        verdict = f"[{_STYLE[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.check, finding.subject, verdict, finding.detail)
    Console().print(table, soft_wrap=True)
