"""Network namespaces without root: making two sites joined by nothing but us, and entering one.

Source:
    namespaces(7), user_namespaces(7), veth(4), packet(7).
"""

import ctypes
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdd.core.errors import ConfigurationError

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_SOL_PACKET: Final = 263
_PACKET_VNET_HDR: Final = 15
_PACKET_IGNORE_OUTGOING: Final = 23
_ETH_P_ALL: Final = 3
_RECEIVE_BUFFER_BYTES: Final = 16 * 2**20
"""As much as the system allows is taken: packets wait here while the emulator has no processor."""

SITE_ADDRESSES: Final = {"a": "10.77.0.1", "b": "10.77.0.2"}
_MACS: Final = {"a": "02:77:00:00:00:01", "b": "02:77:00:00:00:02"}
SITE_DEVICE: Final = "wan"


class NamespacesRefusedError(ConfigurationError):
    """This system does not let us make network namespaces; the message says what refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One end of the line: where programs run, and the packets that leave and reach them."""

    name: str
    address: str
    namespace: str
    """Path that ``setns`` takes, for as long as the emulator lives."""
    packets: socket.socket
    fd: int
    """The namespace, for this process."""
    hub_fd: int
    """The emulator's own namespace."""


def make_sites() -> tuple[Site, Site]:
    """Two sites exist, in a user namespace of this process's own; it must have one thread only.

    Raises:
        NamespacesRefusedError: If the system refuses.
    """
    _become_root_of_namespaces()
    hub = os.open("/proc/self/ns/net", os.O_RDONLY)
    sites = []
    for name in SITE_ADDRESSES:
        _unshare(_CLONE_NEWNET)
        inside = os.open("/proc/self/ns/net", os.O_RDONLY)
        _ip("link set lo up")
        _setns(hub, _CLONE_NEWNET)
        sites.append(_join(name, f"/proc/{os.getpid()}/fd/{inside}", hub, inside))
    return sites[0], sites[1]


def socket_at(site: Site, family: int, kind: int) -> socket.socket:
    """A socket whose packets leave and arrive at the site; only the calling thread went there to make it."""
    _setns(site.fd, _CLONE_NEWNET)
    try:
        return socket.socket(family, kind)
    finally:
        _setns(site.hub_fd, _CLONE_NEWNET)


def enter(*, user_namespace: str, namespace: str, own_sysfs: bool = False) -> None:
    """This process, which must have one thread only, is at the site; what it starts is too.

    Args:
        user_namespace: Path of the emulator's user namespace.
        namespace: Path of the site's network namespace.
        own_sysfs: Show the site's devices in ``/sys``, which some programs look at; others do not see it.

    Raises:
        NamespacesRefusedError: If the system refuses, or the emulator is gone.
    """
    try:
        if not Path(user_namespace).samefile("/proc/self/ns/user"):
            with open(user_namespace, "rb") as file:
                _setns(file.fileno(), _CLONE_NEWUSER)
        with open(namespace, "rb") as file:
            _setns(file.fileno(), _CLONE_NEWNET)
    except OSError as error:
        raise NamespacesRefusedError(f"cannot enter {namespace}: {error.strerror}") from error
    if own_sysfs:
        _unshare(_CLONE_NEWNS)
        for options in (["--make-rprivate", "/"], ["-t", "sysfs", "sysfs", "/sys"]):
            subprocess.run(["mount", *options], check=False, capture_output=True)


def _become_root_of_namespaces() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    except NamespacesRefusedError:
        _unshare(_CLONE_NEWNET)  # root where user namespaces are off
        return
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _join(name: str, path: str, hub: int, inside: int) -> Site:
    """The site has a device, an address and the other site as neighbour; its packets come to us."""
    other = next(each for each in SITE_ADDRESSES if each != name)
    device = f"site-{name}"
    _ip(
        f"link add {device} type veth peer name {SITE_DEVICE}",
        f"link set {SITE_DEVICE} netns {path}",
        f"link set {device} addrgenmode none",
        f"link set {device} up",
    )
    _setns(inside, _CLONE_NEWNET)
    _ip(
        f"link set {SITE_DEVICE} addrgenmode none",
        f"link set {SITE_DEVICE} address {_MACS[name]}",
        f"link set {SITE_DEVICE} up",
        f"addr add {SITE_ADDRESSES[name]}/24 dev {SITE_DEVICE}",
        f"neigh add {SITE_ADDRESSES[other]} lladdr {_MACS[other]} dev {SITE_DEVICE} nud permanent",
    )
    _setns(hub, _CLONE_NEWNET)
    return Site(
        name=name, address=SITE_ADDRESSES[name], namespace=path, packets=_open(device), fd=inside, hub_fd=hub
    )


def _open(device: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _RECEIVE_BUFFER_BYTES)
    sock.settimeout(0)
    sock.bind((device, _ETH_P_ALL))
    return sock


def _ip(*commands: str) -> None:
    try:
        subprocess.run(
            ["ip", "-batch", "-"],
            input="\n".join(commands) + "\n",
            text=True,
            check=True,
            capture_output=True,
        )
    except FileNotFoundError as error:
        raise NamespacesRefusedError("iproute2 (the command ip) is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NamespacesRefusedError(f"ip refused: {error.stderr.strip()}") from error


def _unshare(flags: int) -> None:
    _check(_libc().unshare(flags), "unshare")


def _setns(fd: int, flags: int) -> None:
    _check(_libc().setns(fd, flags), "setns")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        raise NamespacesRefusedError(f"{call}: {os.strerror(ctypes.get_errno())}")


def enter_command(
    argv: Sequence[str], *, user_namespace: str, namespace: str, own_sysfs: bool = False
) -> list[str]:
    """The command line that runs another one at a site."""
    import sys

    flags = ["--own-sysfs"] if own_sysfs else []
    return [sys.executable, "-m", "pdd.link.packet.enter", *flags, user_namespace, namespace, *argv]
