"""``pdd model``: prepares the models that need no download."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdd.engine.families import FAMILIES

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers


def default_cache() -> Path:
    """Where prepared models are kept, unless a flag says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdd" / "models"


def add_parser(commands: "Subparsers") -> None:
    """``pdd model`` exists."""
    parser = commands.add_parser(
        "model",
        help="prepare a small model",
        description="Prepare the demo's model or a tiny one for tests; the last line printed is its folder.",
    )
    parser.add_argument("name", choices=("demo", *FAMILIES))
    parser.add_argument(
        "--cache", type=Path, default=None, metavar="DIR", help="default: ~/.cache/pdd/models"
    )
    parser.add_argument("--seed", type=int, default=0, help="tiny ones: seed of the weights")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from pdd.engine.models import prepare_demo_model, prepare_tiny_model

    cache = arguments.cache or default_cache()
    if arguments.name == "demo":
        folder = prepare_demo_model(cache)
    else:
        folder = prepare_tiny_model(cache, seed=arguments.seed, family=arguments.name)
    print(folder.absolute())
    return 0
