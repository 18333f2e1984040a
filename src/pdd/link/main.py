"""Runs every link of a configuration until it is told to stop."""

import asyncio
import contextlib
import signal

import uvloop
from aiohttp import web

from pdd.config.schema import LinkConfig, PddConfig
from pdd.core.errors import ConfigurationError
from pdd.link.control import control_app
from pdd.link.emulator import LinkEmulator, split_address


def run_links(config: PddConfig) -> int:
    """All links have run until SIGTERM or SIGINT; returns the exit status.

    Raises:
        ConfigurationError: If there is no link, or an address cannot be bound.
    """
    if not config.links:
        raise ConfigurationError("the configuration has no [[links]]: nothing to emulate")
    uvloop.run(_run(config.links))
    return 0


async def _run(links: tuple[LinkConfig, ...]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        for link_config in links:
            link = await stack.enter_async_context(LinkEmulator(link_config))
            if link_config.control:
                await _serve_control(link, link_config.control, stack)
        await stop.wait()


async def _serve_control(link: LinkEmulator, address: str, stack: contextlib.AsyncExitStack) -> None:
    runner = web.AppRunner(control_app(link), access_log=None, shutdown_timeout=1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    host, port = split_address(address)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        where = f"the link's control API cannot listen at {address}"
        raise ConfigurationError(f"{where}: {error.strerror}") from error
