"""Finds and signals the processes that belong to a launch, by what /proc says of them."""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

MARKER = "PDD_LAUNCH_ID"
"""In the environment of every process of a launch. Finds those that left their process group."""

_PROC = Path("/proc")


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (with its id, its identity); None if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def living_members(groups: Mapping[int, int | None], marker: str | None = None) -> set[int]:
    """Ids of the processes, zombies aside, that belong to one of the groups or carry the marker.

    Args:
        groups: Process group id to the start of its leader; a leader that started at another time is a
            stranger who got the same number later.
        marker: Value of ``MARKER`` in the environment.
    """
    ours = {group for group, started in groups.items() if start_ticks(group) in (None, started)}
    found = set()
    for pid in (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()):
        fields = _stat(pid)
        if not fields or fields[0] in "ZX" or pid == os.getpid():
            continue
        if int(fields[2]) in ours or (marker and _carries(pid, marker)):
            found.add(pid)
    return found


def without_trackers(pids: set[int]) -> set[int]:
    """The processes that are not Python's resource trackers.

    A tracker ends by itself when the last process it serves is gone, after it has removed the semaphores and
    shared memory that those left behind. So it has to be killed last, if at all.
    """
    return {pid for pid in pids if b"multiprocessing.resource_tracker" not in _command_line(pid)}


def signal_all(pids: set[int], number: signal.Signals) -> None:
    """Each process has got the signal, if it still lived."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    """State, parent, group, ... as in proc(5) from the third field on; empty if there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command_line(pid: int) -> bytes:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def _carries(pid: int, marker: str) -> bool:
    try:
        return f"{MARKER}={marker}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
