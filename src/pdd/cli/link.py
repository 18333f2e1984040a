"""``pdd link``: runs the emulated lines, or changes one that runs."""

import argparse
import json
from typing import TYPE_CHECKING

from pdd.cli.options import add_config, quantity, read_config
from pdd.core.errors import ConfigurationError
from pdd.core.units import parse_duration_s, parse_rate_bytes_per_s

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers

ACTIONS = ("run", "state", "set", "hold", "resume", "cut")


def add_parser(commands: "Subparsers") -> None:
    """``pdd link`` exists."""
    parser = commands.add_parser(
        "link",
        help="run the link emulator, or change one that runs",
        description="Without an action: run the links of --config. With one: change the line at --control.",
    )
    parser.add_argument("action", nargs="?", default="run", choices=ACTIONS)
    add_config(parser, required=False)
    parser.add_argument("--control", metavar="HOST:PORT", help="control address of a running link")
    parser.add_argument("--rate", type=quantity(parse_rate_bytes_per_s), help="set: e.g. 50mbit")
    parser.add_argument("--delay", type=quantity(parse_duration_s), help="set: one-way, e.g. 15ms")
    parser.add_argument(
        "--forward", metavar="HOST:PORT", help="hold, resume, cut: only this listening address"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.action == "run":
        return _run_links(arguments)
    if not arguments.control:
        raise ConfigurationError(f"pdd link {arguments.action} needs --control HOST:PORT")
    from pdd.link.control import call_control

    names = {"set": ("rate", "delay"), "state": ()}.get(arguments.action, ("forward",))
    body = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.action == "set" and not body:
        raise ConfigurationError("pdd link set needs --rate, --delay or both")
    print(json.dumps(call_control(arguments.control, arguments.action, body), indent=2))
    return 0


def _run_links(arguments: argparse.Namespace) -> int:
    from pdd.link.main import run_links

    if arguments.config is None:
        raise ConfigurationError("pdd link needs --config FILE")
    return run_links(read_config(arguments))
