"""What the launcher has to know of a program before it starts it."""

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pdd.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """A port the program will listen at, and the configuration key that chose it."""

    host: str
    port: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program to run.

    Args:
        name: In messages, and the name of its log file.
        argv: Its command line.
        env: Laid over this process's environment.
        ready_url: Answers 200 once the program can be used.
        ready_socket: A Unix socket that takes connections once the program can be used. With neither, it can
            be as soon as it runs.
        ready_timeout_s: How long that may take.
        ports: What it will listen at.
        files: What it may leave behind (sockets, shared memory): removed before it starts and after it ended.
        stop_order: Lower ones are stopped first, equal ones together.
        grace_s: Seconds between SIGTERM and SIGKILL.
        ends: It does its work and ends; any other program that ends has failed.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    ready_url: str | None = None
    ready_socket: Path | None = None
    ready_timeout_s: float = 60.0
    ports: tuple[PortUse, ...] = ()
    files: tuple[Path, ...] = ()
    stop_order: int = 0
    grace_s: float = 10.0
    ends: bool = False


def check_ports(programs: Iterable[Program]) -> None:
    """Every port of the programs can be listened at.

    Raises:
        ConfigurationError: Naming each port that cannot be, and the key that chose it.
    """
    problems: list[str] = []
    chosen_by: dict[tuple[str, int], str] = {}
    for use in (use for program in programs for use in program.ports):
        other = chosen_by.setdefault((use.host, use.port), use.key)
        if other != use.key:
            problems.append(f"port {use.port} is asked for twice, by {other} and by {use.key}")
        elif problem := _bind_problem(use):
            problems.append(f"port {use.port} ({use.key}) on {use.host} {problem}")
    if problems:
        raise ConfigurationError("\n".join(problems))


def _bind_problem(use: PortUse) -> str | None:
    family = socket.AF_INET6 if ":" in use.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do, so that connections of a server that ended just now do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((use.host, use.port))
            probe.listen(1)
        except OSError as error:
            return (
                "is in use by another program"
                if error.errno == errno.EADDRINUSE
                else f"fails: {error.strerror}"
            )
    return None
