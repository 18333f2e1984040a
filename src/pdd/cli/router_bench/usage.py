"""What a program and its children use, as /proc says it."""

import os
from pathlib import Path

from pdd.launch.procfs import living_members, start_ticks

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_s(leader: int) -> float:
    """CPU time, user and system, of all processes of a group since they began; 0 if there are none."""
    ticks = 0
    for pid in living_members({leader: start_ticks(leader)}):
        fields = _fields(pid, "stat").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / _TICKS_PER_S


def resident_bytes(leader: int) -> int:
    """Resident memory of all processes of a group."""
    pages = 0
    for pid in living_members({leader: start_ticks(leader)}):
        fields = _fields(pid, "statm").split()
        pages += int(fields[1]) if fields else 0
    return pages * _PAGE_BYTES


def _fields(pid: int, file: str) -> str:
    try:
        return (Path("/proc") / str(pid) / file).read_text()
    except OSError:
        return ""  # it ended just now
