"""Follows the configuration file: its list of engines may change while routers and agents run."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from pdd.config.load import load_config
from pdd.config.schema import PddConfig
from pdd.core.errors import ConfigurationError

log = logging.getLogger(__name__)

POLL_S = 1.0
"""An engine that comes or goes takes tens of seconds; a file that is looked at each second is news enough."""


async def follow_config(
    path: Path,
    apply: Callable[[PddConfig], None],
    *,
    poll_s: float = POLL_S,
    wake: asyncio.Event | None = None,
) -> None:
    """Hand every new version of the file to ``apply``, for ever; one that is wrong is logged and not applied.

    Replace the file by a rename, so that half a file is never read. ``wake`` (SIGHUP) has it read at once,
    changed or not.
    """
    wake = wake or asyncio.Event()
    known: tuple[int, int, int] | None = None  # it may have changed since the program read it
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(poll_s):
                await wake.wait()
        is_asked = wake.is_set()
        wake.clear()
        if (stamp := _stamp(path)) is None or (stamp == known and not is_asked):
            continue
        known = stamp
        try:
            config = await asyncio.to_thread(load_config, path)
            apply(config)
        except ConfigurationError as error:
            log.error("the new configuration is not used: %s", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
