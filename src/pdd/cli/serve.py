"""``pdd serve``: one engine and its agent, or the command lines that start them elsewhere."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pdd.cli.options import add_config, find_engine, read_config
from pdd.config.schema import Role
from pdd.core.units import format_duration_s
from pdd.launch.fleet import shell_line
from pdd.launch.serve import prepare_run_dir, serve, serve_programs
from pdd.launch.supervisor import Progress, run_supervised

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """``pdd serve`` exists."""
    parser = commands.add_parser(
        "serve",
        help="run one engine and its agent",
        description="Run stock `vllm serve` with the right flags beside `pdd agent`, and keep both running.",
    )
    parser.add_argument("role", choices=get_args(Role))
    add_config(parser)
    parser.add_argument(
        "--engine", metavar="ID", help="which one, if the configuration has several of the role"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the two command lines instead of running them"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config_path: Path = arguments.config
    config = read_config(arguments)
    engine = find_engine(config, arguments.engine, arguments.role)
    agent_program, engine_program = serve_programs(config, engine, config_path=config_path)
    if arguments.print:
        print(f"# The agent first; both on {engine.host}, as the same user.")
        print(shell_line(agent_program))
        print(shell_line(engine_program))
        return 0
    log_dir = prepare_run_dir(config)
    print(f"logs: {log_dir}", file=sys.stderr)
    return run_supervised(
        lambda supervisor: serve(supervisor, agent_program, engine_program),
        log_dir=log_dir,
        on_progress=print_progress,
    )


def print_progress(progress: Progress) -> None:
    """One line on standard error about what happened to a program."""
    took = f" after {format_duration_s(progress.elapsed_s)}" if progress.elapsed_s else ""
    detail = f": {progress.detail}" if progress.detail else ""
    print(f"{progress.name} {progress.state}{took}{detail}", file=sys.stderr, flush=True)
