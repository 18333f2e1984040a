"""The agent as a process: its control port, its clock and its signals."""

import asyncio
import logging
import signal
import threading
from pathlib import Path
from typing import Final

from aiohttp import web

from pdd.agent.advertise import check_advertised
from pdd.agent.agent import Agent
from pdd.agent.control import make_app
from pdd.config.follow import follow_config
from pdd.config.schema import PddConfig
from pdd.core.errors import ConnectError, PddError
from pdd.transport.choice import choose_transport

_log = logging.getLogger(__name__)
_TICK_S: Final = 1.0
_SHUTDOWN_S: Final = 1.0


def run_agent(config: PddConfig, engine_id: str, *, path: Path | None = None) -> int:
    """The agent has served until SIGTERM or SIGINT; 0, or 1 if it could not start or ended by a bug.

    A thread that ends by an error outside the tree leaves an agent that looks alive and does not serve: no
    engine gets in any more, or a peer is never dialled again. So it ends the agent, and whoever started it
    starts another; what landed is lost with it, and is asked for again.

    Args:
        config: The whole fleet's configuration; peers are found in it.
        engine_id: The engine this agent stands beside.
        path: The file it came from; peers that come, go or move in it do so in the agent.
    """
    try:
        has_bug = asyncio.run(_serve(config, engine_id, path))
    except PddError as error:
        _log.error("agent of %s: %s", engine_id, error)
        return 1
    return int(has_bug)


async def _serve(config: PddConfig, engine_id: str, path: Path | None) -> bool:
    """Whether a bug ended it."""
    stopped, reload = asyncio.Event(), asyncio.Event()
    has_bug = False
    loop = asyncio.get_running_loop()

    def on_bug(end: threading.ExceptHookArgs) -> None:
        nonlocal has_bug
        has_bug = True
        name = end.thread.name if end.thread else "of unknown name"
        _log.critical("thread %s ended by a bug, and so does the agent", name, exc_info=end.exc_value)
        loop.call_soon_threadsafe(stopped.set)

    threading.excepthook = on_bug
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    transport = choose_transport(config, engine_id)
    agent = Agent(config, engine_id, transport=transport)
    engine = config.engine(engine_id)
    runner = web.AppRunner(make_app(agent), access_log=None, shutdown_timeout=_SHUTDOWN_S)
    follower: asyncio.Task[None] | None = None
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, engine.host, engine.control_port).start()
        except OSError as error:
            where = f"{engine.host}:{engine.control_port}"
            raise ConnectError(f"cannot listen on {where}: {error.strerror}") from error
        agent.start()
        await asyncio.to_thread(check_advertised, engine, transport)
        _log.info(
            "agent of %s serves KV on port %d, control on port %d",
            engine_id,
            engine.data_port,
            engine.control_port,
        )
        if path is not None:
            follower = asyncio.create_task(follow_config(path, agent.apply, wake=reload))
        await _tick_until(agent, stopped)
    finally:
        if follower is not None:
            follower.cancel()
        await asyncio.to_thread(agent.stop)
        await runner.cleanup()
        threading.excepthook = threading.__excepthook__
    return has_bug


async def _tick_until(agent: Agent, stopped: asyncio.Event) -> None:
    while not stopped.is_set():
        await asyncio.to_thread(agent.tick)
        try:
            async with asyncio.timeout(_TICK_S):
                await stopped.wait()
        except TimeoutError:
            continue
