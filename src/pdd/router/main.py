"""Runs the router as a process: event loop, signals, drain."""

import asyncio
import logging
import signal

import uvloop
from aiohttp import web

from pdd.config.schema import PddConfig
from pdd.router.app import RouterApp

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that may wait to be accepted; with fewer, the kernel resets those of a thousand clients at once."""


def run_router(config: PddConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; the exit status.

    Open requests may still end within ``router.drain_timeout_s``.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))


async def _serve(config: PddConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
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
    log.info("serving http://%s:%d/v1", config.router.host, config.router.port)
    await stop.wait()
    log.info("draining for at most %g s", config.router.drain_timeout_s)
    await runner.cleanup()
    return 0
