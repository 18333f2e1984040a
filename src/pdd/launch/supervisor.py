"""Starts programs, waits until they are ready, keeps them running, and stops them in order."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Never, Self, TypeVar

import aiohttp

from pdd.core.errors import ConfigurationError, LaunchError
from pdd.launch.child import Child, describe_status
from pdd.launch.program import Program, check_ports
from pdd.launch.reaper import Reaper

MAX_FAILURES = 3
"""So many starts in a row that never became ready: the program will not do better by itself."""
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
HEALTHY_S = 60.0
"""A program that ran this long has earned the short backoff again."""

_PROBE_INTERVAL_S = 0.25
_PROBE_TIMEOUT_S = 5.0

T = TypeVar("T")
State = Literal["starting", "ready", "ended", "restarting", "stopping", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What just happened to a program, for whoever shows it.

    ``elapsed_s`` counts from the program's start.
    """

    name: str
    state: State
    elapsed_s: float = 0.0
    detail: str = ""


class Supervisor:
    """Owner of every program of one launch; use as ``async with``, so that all of them end with the block.

    Args:
        log_dir: Each program's output is appended to ``NAME.log`` here.
        on_progress: Told of every change, at once and on the event loop.
    """

    def __init__(self, *, log_dir: Path, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
        self.serving = False
        """Set by the owner once all is up: from then on, being told to stop is the normal end."""
        self._log_dir = log_dir
        self._on_progress = on_progress
        self._children: list[Child] = []
        self._reaper: Reaper | None = None

    async def __aenter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._reaper = Reaper()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        if self._reaper is not None:
            self._reaper.close()

    @staticmethod
    def check(programs: Iterable[Program]) -> None:
        """No port the programs need is taken.

        Raises:
            ConfigurationError: Naming the ports and the keys that chose them.
        """
        check_ports(programs)

    async def start(self, program: Program) -> Child:
        """The program runs and is ready.

        Raises:
            ConfigurationError: If a port it needs is taken, or it refuses its flags or file.
            LaunchError: If it ends before it is ready, with its last log lines, or is not ready in time.
        """
        check_ports([program])
        assert self._reaper is not None, "use the supervisor as a context manager"
        started_s = time.monotonic()
        self._tell(program, "starting")
        child = Child(program, log_path=self._log_dir / f"{program.name}.log", reaper=self._reaper)
        self._children.append(child)
        try:
            async with asyncio.timeout(program.ready_timeout_s):
                await self._until_ready(child)
        except TimeoutError:
            error = child.failure(f"was not ready after {program.ready_timeout_s:.0f} s")
            await self._end(child)
            raise error from None
        except (LaunchError, ConfigurationError):
            await self._end(child)
            raise
        if program.ready_url is not None or program.ready_socket is not None:
            self._tell(program, "ready", elapsed_s=time.monotonic() - started_s)
        return child

    async def run(self, program: Program) -> list[str]:
        """The program has run to its end; returns its last lines.

        Raises:
            ConfigurationError: If it refuses its flags or file.
            LaunchError: If it fails, or takes longer than its ``ready_timeout_s``.
        """
        started_s = time.monotonic()
        child = await self.start(program)
        try:
            async with asyncio.timeout(program.ready_timeout_s):
                status = await child.wait()
        except TimeoutError:
            raise child.failure(f"had not ended after {program.ready_timeout_s:.0f} s") from None
        if status != 0:
            raise child.failure(describe_status(status))
        await child.stop()
        self._children.remove(child)
        self._tell(program, "ended", elapsed_s=time.monotonic() - started_s)
        return child.last_lines()

    async def keep(self, program: Program, child: Child | None = None) -> Never:
        """The program is started again whenever it ends, after a growing pause.

        Args:
            program: What to keep running.
            child: The program if it runs already.

        Raises:
            ConfigurationError: If it refuses its flags or file and has never run well: it would do so again.
            LaunchError: If it failed ``MAX_FAILURES`` times in a row before it was ready.
        """
        failures, backoff_s, has_run_well = 0, FIRST_BACKOFF_S, False
        while True:
            started_s = time.monotonic()
            try:
                child = child or await self.start(program)
                failures = 0
                detail = describe_status(await child.wait())
                has_run_well = has_run_well or time.monotonic() - started_s > HEALTHY_S
                failure = child.failure(detail)
                await self._end(child)
                if isinstance(failure, ConfigurationError):
                    raise failure
            except (LaunchError, ConfigurationError) as error:
                failures += 1
                # What ran well with this file may well do so again: a model hub can be away for a minute.
                if failures == MAX_FAILURES or not (has_run_well or isinstance(error, LaunchError)):
                    raise
                detail = str(error)
            child = None
            if time.monotonic() - started_s > HEALTHY_S and not failures:
                backoff_s = FIRST_BACKOFF_S
            self._tell(program, "restarting", detail=f"{detail}; again in {backoff_s:.0f} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def running(self, name: str) -> Child | None:
        """The program of that name, if it has been started and not ended by us."""
        return next((child for child in self._children if child.program.name == name), None)

    async def watch(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, during which no program ended that should run.

        Raises:
            LaunchError, ConfigurationError: If one did, with its last log lines; ``work`` is cancelled then.
        """
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(self._first_end())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                return tasks[0].result()
            raise tasks[1].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_end(self) -> LaunchError | ConfigurationError:
        while True:
            for child in self._children:
                if child.status is not None and not child.program.ends:
                    return child.failure(describe_status(child.status))
            await asyncio.sleep(_PROBE_INTERVAL_S)

    async def stop(self) -> None:
        """Every program has ended, in its order, and nothing it left behind is there."""
        ordered = sorted(self._children, key=lambda child: child.program.stop_order)
        for _, together in groupby(ordered, key=lambda child: child.program.stop_order):
            await asyncio.gather(*(self._stop(child) for child in together))

    def kill_now(self) -> None:
        """Every program is being killed, whatever grace it had; ``stop`` has still to be awaited."""
        if self._reaper is not None:
            self._reaper.hurry()
        for child in self._children:
            child.kill_group()

    async def _stop(self, child: Child) -> None:
        self._tell(child.program, "stopping")
        await child.stop()
        self._tell(child.program, "stopped")
        if child in self._children:
            self._children.remove(child)

    async def _end(self, child: Child) -> None:
        self._tell(child.program, "ended")
        await child.stop()
        self._children.remove(child)

    async def _until_ready(self, child: Child) -> None:
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                if child.status is not None:
                    raise child.failure(f"{describe_status(child.status)} before it was ready")
                if await _is_ready(session, child.program):
                    return
                await asyncio.sleep(_PROBE_INTERVAL_S)

    def _tell(self, program: Program, state: State, *, elapsed_s: float = 0.0, detail: str = "") -> None:
        self._on_progress(Progress(name=program.name, state=state, elapsed_s=elapsed_s, detail=detail))


async def _is_ready(session: aiohttp.ClientSession, program: Program) -> bool:
    if program.ready_socket is not None and not await _listens(program.ready_socket):
        return False
    return program.ready_url is None or await _answers(session, program.ready_url)


async def _listens(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def run_supervised(
    main: Callable[[Supervisor], Awaitable[int]],
    *,
    log_dir: Path,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> int:
    """``main`` has run with a supervisor, and all it started has ended; returns the exit status.

    SIGINT, SIGTERM or SIGHUP cancels ``main``; another one while programs are being stopped kills them. The
    status is then 0 if the supervisor was serving, else 128 and the signal's number, as in a shell.
    """
    return asyncio.run(_run_supervised(main, log_dir, on_progress))


async def _run_supervised(
    main: Callable[[Supervisor], Awaitable[int]], log_dir: Path, on_progress: Callable[[Progress], None]
) -> int:
    received: list[signal.Signals] = []
    supervisor = Supervisor(log_dir=log_dir, on_progress=on_progress)

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
        else:
            supervisor.kill_now()

    async def supervised() -> int:
        async with supervisor:
            return await main(supervisor)

    task = asyncio.ensure_future(supervised())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 0 if supervisor.serving else 128 + received[0]


def private_dir(path: Path) -> Path:
    """The folder exists and only this user can enter it.

    Raises:
        PermissionError: If it is someone else's.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path
