"""The simulator's flags: simulate, plan, feasible, bathtub, chips, and ``bench sim``.

``add_subcommands`` and ``add_bench`` are called by the ``pdd`` command.
"""

import argparse
from pathlib import Path

from pdd.sim.claims import QUICK
from pdd.sim.commands.analytic import run_bathtub, run_chips, run_feasible
from pdd.sim.commands.bench import run_bench
from pdd.sim.commands.plan import run_plan
from pdd.sim.commands.simulate import run_simulate


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
            parser.add_argument("--requests", type=positive, help="override workload.requests")
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
        "--prompt-tokens", type=positive, default=64_000, help="prompt length (default: 64000)"
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
    sim.add_argument("--requests", type=positive, default=12_000, help="requests per run of fleet claims")
    sim.add_argument("--json", action="store_true", help="print JSON lines, the summary last")
    sim.set_defaults(run=run_bench)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("expected a number above zero")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))
