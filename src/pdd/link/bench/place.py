"""Where a bench runs: the two sites of a packet line, or this host's loopback."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdd.link.packet.process import PacketLine

SIDES: Final = ("a", "b")
TICKS_PER_S: Final = 100
"""``USER_HZ``, the unit of processor time in ``/proc``; the same on every Linux that Python runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Two sides and what joins them; without a line both are this host."""

    line: PacketLine | None = None

    def host(self, side: str) -> str:
        """The address of a side."""
        return self.line.address(side) if self.line else "127.0.0.1"

    def command(self, side: str, argv: Sequence[str], *, own_sysfs: bool = False) -> list[str]:
        """The command line that runs ``argv`` at a side."""
        return self.line.command(side, argv, own_sysfs=own_sysfs) if self.line else list(argv)

    def make_socket(self, side: str) -> socket.socket:
        """A TCP socket at a side."""
        return self.line.make_socket(side) if self.line else socket.socket()

    def listener(self, side: str) -> socket.socket:
        """A listening TCP socket at a side, on a free port."""
        sock = self.make_socket(side)
        sock.bind((self.host(side), 0))
        sock.listen(256)
        return sock

    def free_port(self, side: str) -> int:
        """A port that nobody used a moment ago."""
        with self.listener(side) as sock:
            return int(sock.getsockname()[1])


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used, its dead threads included.

    Source:
        proc(5), ``/proc/[pid]/stat`` fields 14 and 15.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def private_memory_bytes(pid: int) -> int:
    """The memory a process holds that no other can see: its store and heap, not the engine's primary tier.

    Source:
        proc(5), ``RssAnon`` of ``/proc/[pid]/status``.
    """
    for row in Path(f"/proc/{pid}/status").read_text().splitlines():
        if row.startswith("RssAnon"):
            return int(row.split()[1]) * 1024
    return 0
