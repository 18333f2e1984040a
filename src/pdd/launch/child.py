"""One running program: its process group, its log and its end."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from pdd.core.errors import EXIT_CONFIGURATION, ConfigurationError, LaunchError
from pdd.launch.procfs import MARKER, living_members, signal_all, start_ticks, without_trackers
from pdd.launch.program import Program
from pdd.launch.reaper import Reaper

LOG_LINES = 30
TRACKER_S = 5.0
"""How long a resource tracker may clean up after the processes it served."""

_LOG_TAIL_BYTES = 64 * 2**10
_REASON = re.compile(r"(?:\bpdd\.core\.errors\.\w+|^pdd): (.+)", re.MULTILINE)
"""An error of ours as Python's tracebacks end with it, or as our own programs do."""
_POLL_S = 0.05


class Child:
    """A started program.

    Args:
        program: What to run; its stale files are removed first.
        log_path: Where its output is appended.
        reaper: Told of it, so that it ends with the launcher.

    Raises:
        LaunchError: If it cannot be executed.
    """

    def __init__(self, program: Program, *, log_path: Path, reaper: Reaper) -> None:
        self.program = program
        self.log_path = log_path
        self._reaper = reaper
        self._remove_files()
        reaper.expect_files(program.files)
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = subprocess.Popen(
                    program.argv,
                    env={**os.environ, **program.env, MARKER: reaper.marker},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(
                    program.name, f"cannot be started: {program.argv[0]}: {error.strerror}"
                ) from error
        self._groups = {self.pid: start_ticks(self.pid)}
        reaper.expect_group(self.pid)

    @property
    def pid(self) -> int:
        """Id of its process, and of its process group."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """The exit status, once the program has ended."""
        while (status := self.status) is None:  # noqa: ASYNC110  # only the kernel knows
            await asyncio.sleep(_POLL_S)
        return status

    def signal(self, number: signal.Signals) -> None:
        """The program itself has got the signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill_group(self) -> None:
        """Every process of its group is being killed."""
        signal_all(without_trackers(living_members(self._groups)), signal.SIGKILL)

    async def stop(self) -> None:
        """Nothing of the program runs, and nothing it left behind is there.

        The program gets SIGTERM and its time to stop its own children; then the whole group is killed.
        """
        try:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.program.grace_s):
                    await self.wait()
        finally:
            await self.clean_up()

    async def clean_up(self) -> None:
        """What is left of the group is killed and its files are removed."""
        deadline_s = time.monotonic() + TRACKER_S
        while living := living_members(self._groups):
            late = time.monotonic() > deadline_s
            signal_all(living if late else without_trackers(living), signal.SIGKILL)
            await asyncio.sleep(_POLL_S)
        self._process.wait()
        self._remove_files()
        self._reaper.group_gone(self.pid)

    def last_lines(self) -> list[str]:
        """The last lines it wrote since it was started."""
        return self._log_tail().splitlines()[-LOG_LINES:]

    def failure(self, problem: str) -> LaunchError | ConfigurationError:
        """The error that tells what happened, with the program's last words.

        A program that says by its exit status that a person has to change something gives a
        ``ConfigurationError``: it is of no use to start it again.

        An engine that PDD refuses says why, and then vLLM's processes bury it under their tracebacks.
        """
        reasons = _REASON.findall(self._log_tail())
        error = LaunchError(
            self.program.name,
            f"{problem}: {reasons[-1]}" if reasons else problem,
            log_lines=self.last_lines(),
            log_path=str(self.log_path),
        )
        return ConfigurationError(str(error)) if self.status == EXIT_CONFIGURATION else error

    def _log_tail(self) -> str:
        """The end of the log; nothing if somebody has removed it."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _LOG_TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _remove_files(self) -> None:
        for file in self.program.files:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()


def describe_status(status: int) -> str:
    """An exit status in words: ``ended with status 1`` or ``was killed by SIGKILL``."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
