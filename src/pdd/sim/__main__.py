"""``python -m pdd.sim``: the simulator's subcommands without the rest of PDD."""

import argparse
import sys
from collections.abc import Sequence

from pdd.core.errors import ConfigurationError, PddError
from pdd.sim.commands import add_subcommands

EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The subcommand has run; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pdd.sim", description=__doc__)
    add_subcommands(parser.add_subparsers(metavar="COMMAND", required=True))
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except PddError as error:
        sys.stderr.write(f"pdd: {error}\n")
        return EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
