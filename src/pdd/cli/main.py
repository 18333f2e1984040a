"""The ``pdd`` command and its subcommands; errors a person can fix end in one clear message and status 2."""

import argparse
import logging
import sys
from collections.abc import Sequence

from pdd import __version__
from pdd.cli import services
from pdd.core.errors import EXIT_CONFIGURATION, ConfigurationError, PddError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The command has run; returns its exit status.

    0 is success, 1 a failure of something that ran, 2 a flag or file that has to be changed.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = make_parser(only_services=command_of(given) in services.COMMANDS).parse_args(given)
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        status: int = arguments.run(arguments)
    except ConfigurationError as error:
        print(f"pdd: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except PddError as error:
        print(f"pdd: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def command_of(argv: Sequence[str]) -> str | None:
    """The first word that is no option of ``pdd`` itself."""
    words = iter(argv)
    for word in words:
        if word == "--log-level":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def make_parser(*, only_services: bool = False) -> argparse.ArgumentParser:
    """The parser of the whole command line; each subcommand sets ``run``.

    Args:
        only_services: Leave out what a long-running process never needs: it would hold 25 MB of it.
    """
    parser = argparse.ArgumentParser(
        prog="pdd",
        description="One large language model over two datacenters: prefill in one, decode in the other.",
    )
    parser.add_argument("--version", action="version", version=f"pdd {__version__}")
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="default: info"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    if only_services:
        services.add_parser(commands)
        return parser
    from pdd.cli import bench, certs, link, model, serve
    from pdd.cli.demo import command as demo
    from pdd.cli.doctor import command as doctor
    from pdd.sim.commands.flags import add_subcommands as add_simulator

    for part in (demo, serve, services, link, model, bench, certs, doctor):
        part.add_parser(commands)
    add_simulator(commands)
    return parser
