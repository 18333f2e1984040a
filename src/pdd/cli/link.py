"""``pdd link``: runs emulated lines, changes one that runs, and runs programs at a packet line's sites."""

import argparse
import json
import os
from typing import TYPE_CHECKING

from pdd.cli.options import add_config, quantity, read_config
from pdd.core.errors import ConfigurationError
from pdd.core.units import parse_duration_s, parse_rate_bytes_per_s, parse_ratio, parse_size_bytes

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers

ACTIONS = ("run", "packets", "enter", "state", "set", "hold", "resume", "cut")
DEFAULT_CONTROL = "127.0.0.1:0"
SETTINGS = {
    "rate": ("rate_bytes_per_s", parse_rate_bytes_per_s, "e.g. 50mbit"),
    "delay": ("delay_s", parse_duration_s, "one-way, e.g. 15ms"),
    "jitter": ("jitter_s", parse_duration_s, "packets only: up to so much more or less delay"),
    "loss": ("loss_ratio", parse_ratio, "packets only: share of packets lost, e.g. 0.01%%"),
    "queue": ("queue_bytes", parse_size_bytes, "packets only: e.g. 4MB; default: one round trip's worth"),
    "idle_drop": ("idle_drop_s", parse_duration_s, "packets only: silence after which a flow is forgotten"),
}


def add_parser(commands: "Subparsers") -> None:
    """``pdd link`` exists."""
    parser = commands.add_parser(
        "link",
        help="run the link emulator, or change one that runs",
        description="run: the links of --config, as a relay of TCP connections. packets: one line between two"
        " network namespaces. enter SITE COMMAND...: run a command at a site (a or b) of the packet line at"
        " --control. The others show or change the line at --control.",
    )
    parser.add_argument("action", nargs="?", default="run", choices=ACTIONS)
    parser.add_argument("words", nargs="*", metavar="WORD", help="enter: SITE COMMAND...")
    add_config(parser, required=False)
    parser.add_argument("--control", metavar="HOST:PORT", help="control address of a link")
    for name, (_, parse, text) in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=quantity(parse), help=f"set, packets: {text}")
    parser.add_argument(
        "--forward", metavar="HOST:PORT", help="hold, resume, cut: only this listening address"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.words and arguments.action != "enter":
        raise ConfigurationError(f"pdd link {arguments.action} takes no {arguments.words[0]!r}")
    if arguments.action == "run":
        return _run_links(arguments)
    if arguments.action == "packets":
        return _run_packets(arguments)
    if not arguments.control:
        raise ConfigurationError(f"pdd link {arguments.action} needs --control HOST:PORT")
    if arguments.action == "enter":
        return _enter(arguments)
    from pdd.link.control import call_control

    names = {"set": tuple(SETTINGS), "state": ()}.get(arguments.action, ("forward",))
    body = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.action == "set" and not body:
        raise ConfigurationError("pdd link set needs --rate, --delay or another setting")
    print(json.dumps(call_control(arguments.control, arguments.action, body), indent=2))
    return 0


def _run_links(arguments: argparse.Namespace) -> int:
    from pdd.link.main import run_links

    if arguments.config is None:
        raise ConfigurationError("pdd link needs --config FILE")
    return run_links(read_config(arguments))


def _run_packets(arguments: argparse.Namespace) -> int:
    from pdd.link.packet.pipe import LineSettings
    from pdd.link.packet.process import PacketLine

    if arguments.rate is None or arguments.delay is None:
        raise ConfigurationError("pdd link packets needs --rate and --delay")
    given = {
        inside: parse(getattr(arguments, name))
        for name, (inside, parse, _) in SETTINGS.items()
        if getattr(arguments, name) is not None
    }
    try:
        settings = LineSettings(
            rate_bytes_per_s=given.pop("rate_bytes_per_s"), delay_s=given.pop("delay_s")
        ).changed(**given)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    with PacketLine(settings, control=arguments.control or DEFAULT_CONTROL) as line:
        print(f"site a is {line.address('a')}, site b is {line.address('b')}; run programs there with:")
        print(f"  pdd link --control {line.control} enter a -- COMMAND...", flush=True)
        return line.wait()


def _enter(arguments: argparse.Namespace) -> int:
    from pdd.link.control import call_control
    from pdd.link.packet.namespaces import enter_command

    state = call_control(arguments.control, "state")
    sites = state.get("sites", {})
    if len(arguments.words) < 2 or arguments.words[0] not in sites:
        known = " or ".join(sites) or "of which this link has none: it is a relay"
        raise ConfigurationError(f"pdd link enter needs a site ({known}) and a command")
    site, *command = arguments.words
    argv = enter_command(command, user_namespace=state["user_namespace"], namespace=sites[site]["namespace"])
    os.execv(argv[0], argv)  # noqa: S606  # the command is the user's own
