"""The parse process: loads the parsers, serves one Unix socket, ends on SIGTERM or SIGINT."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from pdd.config.load import parse_socket
from pdd.config.schema import PddConfig
from pdd.core.errors import ConfigurationError
from pdd.parse.parsers import Parsers
from pdd.parse.service import ParseConnection

log = logging.getLogger(__name__)


def run_parser(config: PddConfig) -> int:
    """The parsers have served until a signal; the exit status.

    Raises:
        ConfigurationError: If the model has no such parsers, or the socket cannot be made.
    """
    begun_s = time.monotonic()
    model = config.model
    parsers = Parsers(
        model_path=model.path,
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
    )
    log.info("parsers of %s loaded in %.1f s", model.path, time.monotonic() - begun_s)
    path = parse_socket(config)
    path.unlink(missing_ok=True)
    old_mask = os.umask(0o177)  # what passes here is the clients' text
    try:
        asyncio.run(_serve(parsers, path, then=lambda: os.umask(old_mask)))
    finally:
        path.unlink(missing_ok=True)
    return 0


async def _serve(parsers: Parsers, path: Path, *, then: Callable[[], object]) -> None:
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
