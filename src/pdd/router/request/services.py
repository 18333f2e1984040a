"""What every request shares: made once, when the router starts."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from pdd.config.schema import PddConfig
from pdd.router.decisions import DecisionLog
from pdd.router.door import Door
from pdd.router.fastpath.lanes import FastPath
from pdd.router.fleet import Fleet
from pdd.router.metrics import RouterMetrics
from pdd.router.parsing import ParserClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every request shares."""

    config: PddConfig
    fleet: Fleet
    tokenizer: Tokenizer
    metrics: RouterMetrics
    background: Callable[[Coroutine[Any, Any, None]], None]
    door: Door
    decisions: DecisionLog
    parser: ParserClient
    fast_path: FastPath | None
