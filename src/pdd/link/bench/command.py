"""``pdd bench link``: the flags, what people read while it runs, and the object on the last line."""

import argparse
import json
import sys
from typing import Any

from pdd.core.errors import ConfigurationError
from pdd.core.units import parse_duration_s, parse_rate_bytes_per_s, parse_ratio
from pdd.link.bench.run import BenchSettings, run_link_bench
from pdd.link.packet.namespaces import NamespacesRefusedError

PARTS = tuple(sorted(BenchSettings().parts))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The parser takes the bench's flags."""
    parser.add_argument("--rate", default="1gbit", help="line rate (default: 1gbit)")
    parser.add_argument("--delay", default="15ms", help="one-way delay (default: 15ms)")
    parser.add_argument("--loss", default="0.01%", help="of the lossy part (default: 0.01%%)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="repetitions, of which medians count (default: 3)"
    )
    parser.add_argument(
        "--streams", type=int, help="data streams of the agents (default: the configuration's)"
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="measure only this; may be repeated")
    parser.add_argument(
        "--json", action="store_true", help="print nothing but the last line, one JSON object"
    )


def run(arguments: argparse.Namespace) -> int:
    """The bench has run and its figures are printed; returns the exit status.

    Raises:
        ConfigurationError: If a flag is wrong, or the system allows no packet emulator.
    """
    try:
        settings = BenchSettings(
            rate_bytes_per_s=parse_rate_bytes_per_s(arguments.rate),
            delay_s=parse_duration_s(arguments.delay),
            loss_ratio=parse_ratio(arguments.loss),
            rounds=arguments.rounds,
            streams=arguments.streams,
            parts=frozenset(arguments.only or PARTS),
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    say = _say_nothing if arguments.json else _say
    try:
        figures: dict[str, Any] = run_link_bench(settings, say)
    except NamespacesRefusedError as error:
        raise ConfigurationError(
            f"the bench needs the packet emulator: {error}. The relay cannot stand in: it shows neither"
            " congestion control nor loss. What needs no line can be measured with --only loopback"
        ) from error
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _say_nothing(_text: str) -> None:
    pass


def main() -> int:
    """``python -m pdd.link.bench.command``: the bench without the ``pdd`` command."""
    parser = argparse.ArgumentParser(prog="pdd bench link")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
