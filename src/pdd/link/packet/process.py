"""The handle of a running packet emulator: starts it, changes it, and runs programs at its sites."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from pdd.link.control import call_control
from pdd.link.packet.namespaces import NamespacesRefusedError, enter_command
from pdd.link.packet.pipe import LineSettings

_STOP_S: Final = 5.0


class PacketLine:
    """A packet emulator in a process of its own, usable as ``with PacketLine(settings) as line``.

    Args:
        settings: What the line does at first.
        control: ``host:port`` of the control API; by default a free port of this host.

    Raises:
        NamespacesRefusedError: If the system does not allow it.
    """

    def __init__(self, settings: LineSettings, *, control: str = "127.0.0.1:0") -> None:
        host, _, port = control.rpartition(":")
        self._owner, theirs = socket.socketpair()
        with socket.create_server((host, int(port))) as listener, theirs:
            self.control = "{}:{}".format(*listener.getsockname())
            fds = [listener.fileno(), theirs.fileno()]
            argv = [*map(str, fds), msgspec.json.encode(settings).decode()]
            # A session of its own: an interrupt in the terminal ends us first, and the emulator with us.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdd.link.packet.main", *argv], pass_fds=fds, start_new_session=True
            )
        said = self._owner.makefile("rb").readline()
        self._ready: dict[str, Any] = json.loads(said) if said else {"refused": "the emulator died"}
        if "refused" in self._ready:
            self.close()
            raise NamespacesRefusedError(self._ready["refused"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, site: str) -> str:
        """The IP address of a site, ``a`` or ``b``."""
        return str(self._ready["sites"][site]["address"])

    def command(self, site: str, argv: Sequence[str], *, own_sysfs: bool = False) -> list[str]:
        """The command line that runs ``argv`` at a site."""
        return enter_command(
            argv,
            user_namespace=self._ready["user_namespace"],
            namespace=self._ready["sites"][site]["namespace"],
            own_sysfs=own_sysfs,
        )

    def make_socket(self, site: str, *, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A new IPv4 socket whose packets leave and arrive at the site, whatever process uses it."""
        self._owner.sendall(json.dumps([site, int(socket.AF_INET), int(kind)]).encode())
        _, fds, _, _ = socket.recv_fds(self._owner, 1, 1)
        if not fds:
            raise NamespacesRefusedError("the emulator is gone")
        return socket.socket(fileno=fds[0])

    def call(self, action: str, **body: str) -> dict[str, Any]:
        """What the control API answers to ``state``, ``set``, ``hold``, ``resume`` or ``cut``."""
        return call_control(self.control, action, body)

    def wait(self) -> int:
        """The emulator has ended; its exit status."""
        return self._process.wait()

    def close(self) -> None:
        """The line is gone; programs at its sites reach only themselves."""
        self._owner.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def refusal() -> str | None:
    """Why this system lets nobody run the packet emulator; None if it does."""
    if not Path("/proc/self/ns/net").exists():
        return "this system has no network namespaces"
    try:
        PacketLine(LineSettings(rate_bytes_per_s=1e6, delay_s=0.0)).close()
    except NamespacesRefusedError as error:
        return str(error)
    return None
