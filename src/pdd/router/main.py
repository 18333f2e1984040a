"""Runs the router as a process: event loop, signals, drain."""

import asyncio
import gc
import logging
import signal
from pathlib import Path

import uvloop
from aiohttp import web

from pdd.config.follow import follow_config
from pdd.config.schema import PddConfig
from pdd.router.app import RouterApp

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that may wait to be accepted; with fewer, the kernel resets many of a thousand at once."""
GC_ALLOCATIONS = 50_000
"""Objects made and not freed until the youngest are searched for cycles; some hundred requests."""


def run_router(config: PddConfig, *, path: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain; the exit status.

    Open requests may still end within ``router.drain_timeout_s``. Engines that come or go in the file at
    ``path`` come or go in the router.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, path))


def settle_memory() -> None:
    """What exists by now is never searched again, and searching for cycles waits for many requests.

    A request in progress is hundreds of objects that live as long as its stream, and hardly any garbage is
    cyclic. With Python's own thresholds a full collection follows every quarter of growth and stops all
    streams: a tenth of a second at a thousand of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)


async def _serve(config: PddConfig, path: Path | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    reload = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    router = RouterApp(config)
    runner = web.AppRunner(
        router.app,
        handler_cancellation=True,  # a client that leaves ends its request everywhere
        shutdown_timeout=config.router.drain_timeout_s,
        access_log=None,
    )
    await runner.setup()
    site = web.TCPSite(runner, config.router.host, config.router.port, backlog=BACKLOG)
    try:
        await site.start()
    except OSError as error:
        log.error("cannot listen at %s:%d: %s", config.router.host, config.router.port, error.strerror)
        await runner.cleanup()
        return 1
    settle_memory()
    log.info("serving http://%s:%d/v1", config.router.host, config.router.port)
    follower = _follow(path, router, reload) if path else None
    await stop.wait()
    if follower is not None:
        follower.cancel()
    log.info("draining for at most %g s", config.router.drain_timeout_s)
    await runner.cleanup()
    return 0


def _follow(path: Path, router: RouterApp, reload: asyncio.Event) -> asyncio.Task[None]:
    return asyncio.create_task(follow_config(path, router.fleet.apply, wake=reload))
