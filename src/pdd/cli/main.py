"""The ``pdd`` command and its subcommands; errors a person can fix end in one clear message and status 2."""

import argparse
import logging
import sys
from collections.abc import Sequence

from pdd import __version__
from pdd.cli import bench, certs, link, model, serve, services
from pdd.cli.demo import command as demo
from pdd.cli.doctor import command as doctor
from pdd.core.errors import ConfigurationError, PddError
from pdd.sim.commands.flags import add_subcommands as add_simulator

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The command has run; returns its exit status.

    0 is success, 1 a failure of something that ran, 2 a flag or file that has to be changed.
    """
    arguments = make_parser().parse_args(argv)
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


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each subcommand sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="pdd",
        description="One large language model over two datacenters: prefill in one, decode in the other.",
    )
    parser.add_argument("--version", action="version", version=f"pdd {__version__}")
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="default: info"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for part in (demo, serve, services, link, model, bench, certs, doctor):
        part.add_parser(commands)
    add_simulator(commands)
    return parser
