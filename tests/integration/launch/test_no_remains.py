"""However the launcher ends, no process and no file of what it started is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdd.launch.ports import free_ports

LAUNCHER = Path(__file__).with_name("fake_launcher.py")


def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)


class Launch:
    """A fake launcher that is up, and everything it started."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, LAUNCHER, folder, *map(str, free_ports(2)), *flags],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        self.started = psutil.Process(self.process.pid).children(recursive=True)
        # Two programs, a child of each, the reaper, and Python's resource trackers.
        assert len(self.started) == (7 if "--shared-memory" in flags else 5)
        assert len(self.files()) == (4 if "--shared-memory" in flags else 2)

    def files(self) -> list[Path]:
        names = [Path("/dev/shm", file.read_text()) for file in self.folder.glob("*.shm")]
        shared = [path for path in names if path.exists()]
        return [path for path in self.folder.glob("remains-*") if path.suffix != ".shm"] + shared

    def living(self) -> list[psutil.Process]:
        return [p for p in self.started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def is_clean(self) -> bool:
        return not self.living() and not self.files()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(*flags: str) -> Launch:
        launches.append(Launch(tmp_path, *flags))
        return launches[-1]

    yield start
    for started in launches:
        started.process.kill()
        started.process.wait()
        for process in started.living():
            process.kill()
        assert started.process.stdout is not None
        started.process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_before_the_launcher_ends(
    launch: Callable[..., Launch], number: signal.Signals
) -> None:
    subject = launch()
    subject.process.send_signal(number)
    assert subject.process.wait(60) == 0
    assert subject.is_clean()


def test_ctrl_c_in_a_terminal_reaches_only_the_launcher(launch: Callable[..., Launch]) -> None:
    subject = launch()
    os.killpg(subject.process.pid, signal.SIGINT)  # what a terminal does
    assert subject.process.wait(60) == 0
    assert subject.is_clean()


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(launch: Callable[..., Launch]) -> None:
    subject = launch("--stubborn", "--grace", "1")
    subject.process.send_signal(signal.SIGTERM)
    assert subject.process.wait(60) == 0
    assert subject.is_clean()


def test_a_second_ctrl_c_does_not_wait_for_the_grace(launch: Callable[..., Launch]) -> None:
    subject = launch("--stubborn", "--detached-child", "--grace", "600")
    subject.process.send_signal(signal.SIGINT)
    assert subject.process.stdout is not None
    assert subject.process.stdout.readline() == b"stopping\n"  # else the two signals may arrive as one
    subject.process.send_signal(signal.SIGINT)
    subject.process.wait(60)
    until(subject.is_clean)


def test_kill_9_of_the_launcher_leaves_nothing(launch: Callable[..., Launch]) -> None:
    subject = launch()
    subject.process.kill()
    subject.process.wait()
    until(subject.is_clean)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_shared_memory_of_programs_that_had_to_be_killed_is_removed(
    launch: Callable[..., Launch], number: signal.Signals
) -> None:
    subject = launch("--stubborn", "--shared-memory", "--grace", "1")
    subject.process.send_signal(number)
    subject.process.wait(60)
    until(subject.is_clean)


def test_kill_9_finds_processes_that_left_their_group(launch: Callable[..., Launch]) -> None:
    subject = launch("--detached-child")
    os.killpg(subject.process.pid, signal.SIGKILL)
    subject.process.wait()
    until(subject.is_clean)
