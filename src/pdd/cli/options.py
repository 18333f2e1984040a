"""Options and argument types that several subcommands share."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pdd.config.load import load_config
from pdd.config.schema import EngineConfig, PddConfig, Role
from pdd.core.errors import ConfigurationError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # argparse names it no other way


def add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The parser takes ``--config``."""
    parser.add_argument("--config", type=Path, required=required, metavar="FILE", help="pdd.toml")


def quantity(parse: Callable[[str], float]) -> Callable[[str], str]:
    """An argument type that checks a quantity such as ``200mbit`` and keeps it as it was typed."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return check


def read_config(arguments: argparse.Namespace) -> PddConfig:
    """The configuration that ``--config`` names.

    Raises:
        ConfigurationError: If it cannot be read or is wrong.
    """
    config: Path = arguments.config
    return load_config(config)


def find_engine(config: PddConfig, engine_id: str | None, role: Role | None = None) -> EngineConfig:
    """The engine that flags name: by id, or the only one of a role.

    Raises:
        ConfigurationError: If there is none, or more than one; the ids to choose from are named.
    """
    fitting = [e for e in config.engines if role in (None, e.role) and engine_id in (None, e.id)]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(f"{engine.id} ({engine.role})" for engine in config.engines)
    wanted = " ".join(part for part in (engine_id and f"{engine_id!r}", role and f"of role {role}") if part)
    problem = "there is no engine" if not fitting else "there is more than one engine"
    raise ConfigurationError(f"{problem} {wanted}; choose one with --engine: {known}")
