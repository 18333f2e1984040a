"""``pdd agent`` and ``pdd router``: one process each, run until they are told to stop."""

import argparse
from typing import TYPE_CHECKING, get_args

from pdd.cli.options import add_config, find_engine, read_config
from pdd.config.schema import HandoffChoice, PipelineChoice

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """``pdd agent`` and ``pdd router`` exist."""
    agent = commands.add_parser("agent", help="run the agent beside one engine")
    add_config(agent)
    agent.add_argument("--engine", required=True, metavar="ID", help="id of the engine in the configuration")
    agent.set_defaults(run=_run_agent)

    router = commands.add_parser("router", help="run the OpenAI endpoint")
    add_config(router)
    router.add_argument("--host", help="instead of router.host")
    router.add_argument("--port", type=int, help="instead of router.port")
    router.add_argument("--pipeline", choices=get_args(PipelineChoice), help="instead of router.pipeline")
    router.add_argument("--handoff", choices=get_args(HandoffChoice), help="instead of router.handoff")
    router.set_defaults(run=_run_router)


def _run_agent(arguments: argparse.Namespace) -> int:
    from pdd.agent.main import run_agent

    config = read_config(arguments)
    return run_agent(config, find_engine(config, arguments.engine).id, path=arguments.config)


def _run_router(arguments: argparse.Namespace) -> int:
    from pdd.router.main import run_router

    config = read_config(arguments)
    flags = {name: getattr(arguments, name) for name in ("host", "port", "pipeline", "handoff")}
    given = {name: value for name, value in flags.items() if value is not None}
    config = config.model_copy(update={"router": config.router.model_copy(update=given)})
    return run_router(config, path=arguments.config)
