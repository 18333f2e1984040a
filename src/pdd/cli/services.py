"""``pdd agent``, ``pdd router`` and ``pdd parser``: run until they are told to stop."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pdd.cli.options import add_config, find_engine, read_config
from pdd.cli.serve import print_progress
from pdd.config.schema import HandoffChoice, PddConfig, PipelineChoice
from pdd.launch.fleet import parser_program, router_program, router_url
from pdd.launch.serve import prepare_run_dir, serve
from pdd.launch.supervisor import run_supervised

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers

COMMANDS = frozenset({"agent", "router", "parser"})


def add_parser(commands: "Subparsers") -> None:
    """``pdd agent``, ``pdd router`` and ``pdd parser`` exist."""
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
    router.add_argument(
        "--alone", action="store_true", help="where the model has parsers, they are started elsewhere"
    )
    router.set_defaults(run=_run_router)

    parser = commands.add_parser("parser", help="run the parsers of tool calls and reasoning beside a router")
    add_config(parser)
    parser.add_argument("--port", type=int, help="of its router, instead of router.port")
    parser.set_defaults(run=_run_parser)


def _run_agent(arguments: argparse.Namespace) -> int:
    from pdd.agent.main import run_agent

    config = read_config(arguments)
    return run_agent(config, find_engine(config, arguments.engine).id, path=arguments.config)


def _run_router(arguments: argparse.Namespace) -> int:
    from pdd.router.main import run_router

    config = read_config(arguments)
    given = _given(arguments, "host", "port", "pipeline", "handoff")
    config = _with_router(config, given)
    if config.model.parses_answers and not arguments.alone:
        return _run_with_parser(config, arguments.config, given)
    return run_router(config, path=arguments.config)


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, object]:
    """The flags among ``names`` that were given."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _with_router(config: PddConfig, given: Mapping[str, object]) -> PddConfig:
    return config.model_copy(update={"router": config.router.model_copy(update=given)})


def _run_with_parser(config: PddConfig, path: Path, given: Mapping[str, object]) -> int:
    """The router and the parsers beside it, both started again when they end."""
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    program = router_program(config, config_path=path)
    # It lives before its engines do, and they may take as long as they need.
    program = replace(
        program, argv=(*program.argv, "--alone", *flags), ready_url=f"{router_url(config)}/health"
    )
    parser = parser_program(config, config_path=path)
    return run_supervised(
        lambda supervisor: serve(supervisor, parser, program),
        log_dir=prepare_run_dir(config),
        on_progress=print_progress,
    )


def _run_parser(arguments: argparse.Namespace) -> int:
    from pdd.parse.main import run_parser

    config = _with_router(read_config(arguments), _given(arguments, "port"))
    prepare_run_dir(config)
    return run_parser(config, source=str(arguments.config))
