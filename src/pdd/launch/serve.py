"""Keeps one engine and the agent beside it running: what ``pdd serve`` does."""

import asyncio
from pathlib import Path

from pdd.config.load import default_run_dir
from pdd.config.schema import EngineConfig, PddConfig
from pdd.core.errors import ConfigurationError, LaunchError
from pdd.launch.fleet import agent_program, engine_program
from pdd.launch.program import Program
from pdd.launch.supervisor import Supervisor, private_dir


def serve_programs(config: PddConfig, engine: EngineConfig, *, config_path: Path) -> tuple[Program, Program]:
    """The agent and the engine, in the order in which they start."""
    return agent_program(config, engine, config_path=config_path), engine_program(config, engine)


def prepare_run_dir(config: PddConfig) -> Path:
    """The folder of sockets and logs exists; returns the one of the logs.

    Raises:
        ConfigurationError: If it cannot be made, or is another user's.
    """
    run_dir = default_run_dir(config)
    try:
        private_dir(run_dir)
        return private_dir(run_dir / "logs")
    except OSError as error:
        raise ConfigurationError(f"run_dir {run_dir} cannot be used: {error.strerror or error}") from error


async def serve(supervisor: Supervisor, agent: Program, engine: Program) -> int:
    """Agent and engine run until this is cancelled; each is started again alone when it ends.

    The agent's store outlives the engine, so the next engine finds what the last one had. A parser and its
    router are kept in the same way.

    Raises:
        ConfigurationError: If a port is taken.
        LaunchError: If one of them cannot be started, or keeps failing.
    """
    supervisor.check([agent, engine])
    running_agent = await supervisor.start(agent)
    engine_task = asyncio.ensure_future(supervisor.keep(engine))
    agent_task = asyncio.ensure_future(supervisor.keep(agent, running_agent))
    supervisor.serving = True
    try:
        await asyncio.wait([engine_task, agent_task], return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in (engine_task, agent_task):
            task.cancel()
        results = await asyncio.gather(engine_task, agent_task, return_exceptions=True)
    raise next(error for error in results if isinstance(error, ConfigurationError | LaunchError))
