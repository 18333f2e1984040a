"""A second process that cleans up after the launcher, however the launcher ended.

The launcher writes down what it started into a pipe; the reaper, in a session of its own, reads until the
pipe ends. That happens when the launcher is gone, even by SIGKILL, since the kernel closes the pipe. Then
whatever still runs is stopped and whatever was left behind is removed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from pdd.launch.procfs import living_members, signal_all, start_ticks, without_trackers

GRACE_S = 10.0
TRACKER_S = 5.0
_POLL_S = 0.1


class Reaper:
    """The launcher's end of the pipe. ``marker`` goes into the environment of everything it starts."""

    def __init__(self) -> None:
        self.marker = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdd.launch.reaper", self.marker],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def expect_files(self, files: Iterable[Path]) -> None:
        """The files will be removed if the launcher dies."""
        self._tell({"files": [str(file) for file in files]})

    def expect_group(self, pid: int) -> None:
        """The process group will be stopped if the launcher dies."""
        self._tell({"group": pid, "started": start_ticks(pid)})

    def group_gone(self, pid: int) -> None:
        """The process group has ended and its number may be anyone's."""
        self._tell({"gone": pid})

    def hurry(self) -> None:
        """What is left when the pipe ends is killed without a grace."""
        self._tell({"grace_s": 0})

    def close(self) -> None:
        """The reaper has done what was left to do, and ended."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, note: dict[str, object]) -> None:
        assert self._process.stdin is not None
        # Nobody else kills it by accident; without it the launcher still cleans up after itself.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(note).encode() + b"\n")
            self._process.stdin.flush()


def main(marker: str) -> int:
    """The launcher is gone, and so is everything it wrote down."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, int | None] = {}
    files: set[Path] = set()
    grace_s = GRACE_S
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            break  # the launcher died while it wrote
        note = json.loads(line)
        if "group" in note:
            groups[note["group"]] = note["started"]
        groups.pop(note.get("gone", -1), None)
        grace_s = note.get("grace_s", grace_s)
        files.update(Path(name) for name in note.get("files", ()))
    _stop(groups, marker, grace_s)
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
    return 0


def _stop(groups: dict[int, int | None], marker: str, grace_s: float) -> None:
    signal_all(living_members(groups, marker), signal.SIGTERM)
    started_s = time.monotonic()
    while living := living_members(groups, marker):
        waited_s = time.monotonic() - started_s
        if waited_s >= grace_s + TRACKER_S:
            signal_all(living, signal.SIGKILL)
        elif waited_s >= grace_s:
            signal_all(without_trackers(living), signal.SIGKILL)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    os.chdir("/")  # keeps no folder busy
    sys.exit(main(sys.argv[1]))
