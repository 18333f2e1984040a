"""Chooses ports for programs that are started later."""

import contextlib
import itertools
import random
import socket
from pathlib import Path

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000
HIGHEST = 65_535

_turns = itertools.count(random.randrange(HIGHEST))
"""Which candidate is next. Each process walks on from a place of its own: two that drew anew each time would
now and then draw the same port before either listens there."""


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """So many ports that were free a moment ago, all different.

    They are outside the range from which the system gives ports to outgoing connections: an engine takes a
    minute to boot before it listens, and some connection of another program would have the port by then.

    Raises:
        OSError: If there are not so many.
    """
    outgoing = _outgoing()
    candidates = [port for port in range(LOWEST, HIGHEST) if port not in outgoing]
    chosen: list[int] = []
    with contextlib.ExitStack() as probes:
        for _ in candidates:
            port = candidates[next(_turns) % len(candidates)]
            probe = probes.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise OSError(f"{count} ports were asked for, {len(chosen)} are free on {host}")


def _outgoing() -> range:
    """The system's range for outgoing connections; the usual one where it cannot be read."""
    try:
        first, last = map(int, OUTGOING.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    return range(first, last + 1)
