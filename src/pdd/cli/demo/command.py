"""The flags of ``pdd demo``, and its frame: a run folder, a supervisor, an exit status."""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console

from pdd.cli.demo.run import DemoOptions, run_demo
from pdd.cli.demo.screen import Screen
from pdd.cli.demo.settings import DEMO_MODEL, DemoSettings
from pdd.cli.model import default_cache
from pdd.cli.options import quantity
from pdd.config.schema import HandoffChoice, PipelineChoice
from pdd.core.units import parse_duration_s, parse_rate_bytes_per_s
from pdd.launch.supervisor import private_dir, run_supervised

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers

DEFAULT_RATE = "50mbit"
"""Two cores prefill some 200 tokens a second, 9 MB of KV. A line that carries more has never anything left to
send when the prefill ends, and the relay nothing to bridge; real engines outrun real lines."""

LOG_WIDTH = 130
"""Of what is written to a file or a pipe; the widest table needs it."""


def add_parser(commands: "Subparsers") -> None:
    """``pdd demo`` exists."""
    parser = commands.add_parser(
        "demo",
        help="two datacenters on this machine, with a short script",
        description="Boot three vLLM engines on two sites with an emulated line between them, run a short "
        "script, print what each request took, and keep serving an OpenAI endpoint until Ctrl-C.",
    )
    parser.add_argument(
        "--once", action="store_true", help="end after the script; 0 only if all of it went well"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one object a request, and a summary")
    parser.add_argument(
        "--model", default=DEMO_MODEL, metavar="DIR_OR_NAME", help="default: SmolLM2-135M-Instruct"
    )
    parser.add_argument(
        "--rate", type=quantity(parse_rate_bytes_per_s), default=DEFAULT_RATE, help="of the line"
    )
    parser.add_argument(
        "--delay", type=quantity(parse_duration_s), default="15ms", help="of the line, one way"
    )
    parser.add_argument("--handoff", choices=get_args(HandoffChoice), default="auto")
    parser.add_argument("--pipeline", choices=get_args(PipelineChoice), default="auto")
    parser.add_argument("--port", type=int, default=8000, help="of the OpenAI endpoint; default: 8000")
    parser.add_argument("--reference", action="store_true", help="compare each answer with a plain engine's")
    parser.add_argument("--config-out", type=Path, metavar="FILE", help="also write the pdd.toml here")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="of prepared models; default: ~/.cache/pdd/models"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    options = DemoOptions(
        settings=DemoSettings(
            model=arguments.model,
            rate=arguments.rate,
            delay=arguments.delay,
            handoff=arguments.handoff,
            pipeline=arguments.pipeline,
            port=arguments.port,
        ),
        once=arguments.once,
        reference=arguments.reference,
        json_path=arguments.json,
        config_out=arguments.config_out,
        cache=arguments.cache or default_cache(),
        run_dir=private_dir(Path(tempfile.mkdtemp(prefix="pdd-demo-"))),
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    screen = Screen(console)
    clean = False
    try:
        status = run_supervised(
            lambda supervisor: supervisor.watch(run_demo(supervisor, screen, options)),
            log_dir=options.run_dir / "logs",
            on_progress=screen.show,
        )
        clean = status == 0
    finally:
        if clean:
            shutil.rmtree(options.run_dir, ignore_errors=True)
        else:
            console.print(f"\nlogs are kept in {options.run_dir / 'logs'}", markup=False)
    return status
