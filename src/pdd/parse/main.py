"""The parse process: loads the parsers, serves one Unix socket, ends on SIGTERM or SIGINT."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pdd.config.load import parse_socket
from pdd.config.schema import PddConfig
from pdd.core.errors import ConfigurationError
from pdd.parse.service import ParseConnection

if TYPE_CHECKING:
    from pdd.parse.parsers import Parsers

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 2.0


def run_parser(config: PddConfig, *, source: str) -> int:
    """The parsers have served until a signal; the exit status.

    Args:
        config: The whole configuration.
        source: Where it is from, in messages.

    Raises:
        ConfigurationError: If the model has no such parsers, or the socket cannot be made.
    """
    path = parse_socket(config)
    refuse_to_share(path)
    begun_s = time.monotonic()
    parsers = _load(config, source)
    log.info("parsers of %s loaded in %.1f s", config.model.path, time.monotonic() - begun_s)
    path.unlink(missing_ok=True)
    old_mask = os.umask(0o177)  # what passes here is the clients' text
    try:
        asyncio.run(_serve(parsers, path, then=lambda: os.umask(old_mask)))
    finally:
        path.unlink(missing_ok=True)
    return 0


def refuse_to_share(path: Path) -> None:
    """Nobody listens at the socket, so it may be removed.

    Raises:
        ConfigurationError: If somebody does: the parsers of another router, which would lose them.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConfigurationError(
        f"{path} is in use: routers that share a run_dir need a router.port each, their parsers too (--port)"
    )


def _load(config: PddConfig, source: str) -> "Parsers":
    try:
        from pdd.parse.parsers import Parsers
    except ImportError as error:
        raise ConfigurationError(
            f"{source}: model.tool_call_parser, model.reasoning_parser: the parsers are vLLM's, which cannot "
            f"be imported here ({error}); install it, or run `pdd router --alone` and `pdd parser` beside it"
        ) from error
    return Parsers(config.model, source=source)


async def _serve(parsers: "Parsers", path: Path, *, then: Callable[[], object]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stopped.set)
    try:
        server = await loop.create_unix_server(lambda: ParseConnection(parsers), str(path))
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {path}: {error.strerror or error}") from error
    then()
    log.info("serving %s", path)
    async with server:
        await stopped.wait()
