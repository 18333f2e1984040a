"""The packet emulator as a process: makes the sites, moves packets, serves the control API.

``python -m pdd.link.packet.main CONTROL_FD OWNER_FD SETTINGS_JSON``. The control socket comes from outside,
since in here the host's addresses do not exist. The owner's is a Unix socket: one line of JSON says that the
sites are ready, requests for sockets at a site are answered with descriptors, and its end is ours.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from aiohttp import web

from pdd.link.control import control_app
from pdd.link.packet.loop import DirectionState, PacketLoop
from pdd.link.packet.namespaces import NamespacesRefusedError, Site, make_sites, socket_at
from pdd.link.packet.pipe import LineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteState:
    """Where a site is."""

    address: str
    namespace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PacketLinkState:
    """The answer to ``GET /state``."""

    emulator: str
    settings: LineSettings
    is_cut: bool
    user_namespace: str
    sites: dict[str, SiteState]
    a_to_b: DirectionState
    b_to_a: DirectionState
    middlebox_dropped_packets: int


class PacketLink:
    """What the control API shows and changes."""

    def __init__(self, sites: tuple[Site, Site], settings: LineSettings) -> None:
        self.loop = PacketLoop(*sites, settings)
        self._sites = sites

    def site(self, name: str) -> Site:
        """The site called ``a`` or ``b``."""
        return next(site for site in self._sites if site.name == name)

    def state(self) -> PacketLinkState:
        """See ``ControlledLink.state``."""
        a_to_b, b_to_a = self.loop.state()
        return PacketLinkState(
            emulator="packet",
            settings=self.loop.settings,
            is_cut=self.loop.is_cut,
            user_namespace=f"/proc/{os.getpid()}/ns/user",
            sites={
                site.name: SiteState(address=site.address, namespace=site.namespace) for site in self._sites
            },
            a_to_b=a_to_b,
            b_to_a=b_to_a,
            middlebox_dropped_packets=self.loop.num_middlebox_drops,
        )

    def set_line(self, **changes: float) -> None:
        """See ``ControlledLink.set_line``; an ``idle_drop_s`` of 0 takes the middlebox away."""
        self.loop.configure(self.loop.settings.changed(**changes))

    def hold(self, forward: str | None = None) -> None:
        """See ``PacketLoop.hold``."""
        _refuse_forward(forward)
        self.loop.hold(held=True)

    def resume(self, forward: str | None = None) -> None:
        """The line carries again after ``hold`` or ``cut``."""
        _refuse_forward(forward)
        if self.loop.is_cut:
            self.loop.cut(is_cut=False)
        self.loop.hold(held=False)

    def cut(self, forward: str | None = None) -> None:
        """See ``PacketLoop.cut``."""
        _refuse_forward(forward)
        self.loop.cut(is_cut=True)


def main(argv: Sequence[str]) -> int:
    """The emulator has run until its owner left or it was told to stop."""
    control, owner = (socket.socket(fileno=int(fd)) for fd in argv[:2])
    settings = msgspec.json.decode(argv[2], type=LineSettings)
    with suppress(OSError):  # a line does not wait for busy programs; where this is refused, it does
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        sites = make_sites()
    except (NamespacesRefusedError, OSError) as error:
        owner.sendall(json.dumps({"refused": str(error)}).encode() + b"\n")
        return 1
    link = PacketLink(sites, settings)
    thread = threading.Thread(target=link.loop.run, name="pdd-packets", daemon=True)
    thread.start()
    asyncio.run(_serve(link, control, owner))
    link.loop.close()
    thread.join()
    return 0


async def _serve(link: PacketLink, control: socket.socket, owner: socket.socket) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_reader(owner, lambda: None if _lend_socket(link, owner) else stop.set())
    runner = web.AppRunner(control_app(link), access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.SockSite(runner, control).start()
        owner.sendall(msgspec.json.encode(link.state()) + b"\n")
        await stop.wait()
    finally:
        await runner.cleanup()


def _lend_socket(link: PacketLink, owner: socket.socket) -> bool:
    """The owner has the socket it asked for; False if it has left."""
    asked = owner.recv(256)
    if not asked:
        return False
    name, family, kind = json.loads(asked)
    sock = socket_at(link.site(name), family, kind)
    socket.send_fds(owner, [b"."], [sock.fileno()])
    sock.close()
    return True


def _refuse_forward(forward: str | None) -> None:
    if forward is not None:
        raise KeyError(forward)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
