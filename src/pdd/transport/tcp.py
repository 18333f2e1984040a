"""Plain TCP, tuned for long fat lines: the transport between sites, and between hosts without RDMA."""

import logging
import socket
from contextlib import suppress
from typing import Final

from pdd.core.errors import ConnectError, ConnectionLostError
from pdd.transport.base import Listener, Stream, Transport
from pdd.transport.sockets import SocketStream

_log = logging.getLogger(__name__)

_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""First probe after 15 s, dead after 35 s: below the 60 s after which middleboxes forget idle flows."""
_USER_TIMEOUT_S: Final = 30
"""Sent bytes that nobody acknowledges for so long end the connection; Linux would try for 15 minutes."""
_BACKLOG: Final = 256


class TcpTransport(Transport):
    """Dials and listens over IPv4 and IPv6."""

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """See ``Transport.dial``."""
        return SocketStream(connect_socket(address, timeout_s=timeout_s), address)

    def listen(self, address: str) -> Listener:
        """See ``Transport.listen``."""
        return TcpListener(bind_socket(address))


class TcpListener(Listener):
    """Owns a listening socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._address = join_address(*sock.getsockname()[:2])
        self._is_closed = False

    @property
    def address(self) -> str:
        """See ``Listener.address``."""
        return self._address

    def accept(self) -> Stream:
        """See ``Listener.accept``."""
        return SocketStream(*self.accept_socket())

    def accept_socket(self) -> tuple[socket.socket, str]:
        """As ``accept``, but the bare socket and where its other end is."""
        while not self._is_closed:
            try:
                sock, where = self._sock.accept()
            except ConnectionError:
                continue  # that peer left before its turn came
            except OSError as error:
                raise ConnectionLostError(f"listener at {self._address}: {error.strerror}") from error
            _tune(sock)
            return sock, join_address(*where[:2])
        raise ConnectionLostError(f"listener at {self._address} is closed")

    def close(self) -> None:
        """See ``Listener.close``."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):  # nothing was blocked
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def connect_socket(address: str, *, timeout_s: float) -> socket.socket:
    """A connected, tuned socket; the name is resolved anew, and each of its addresses is tried.

    Raises:
        ConnectError: If nobody answers there in time.
    """
    host, port = split_address(address)
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except TimeoutError as error:
        raise ConnectError(f"no answer from {address} in {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectError(f"cannot connect to {address}: {error.strerror or error}") from error
    _tune(sock)
    return sock


def bind_socket(address: str) -> socket.socket:
    """A listening socket.

    Raises:
        ConnectError: If the address cannot be bound.
    """
    host, port = split_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConnectError(f"cannot listen on {address}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConnectError(f"cannot listen on {address}: {error.strerror or error}") from error
    return sock


def num_streams_for_long_line() -> int:
    """How many TCP flows fill a long line and keep it full.

    With BBR two do, and they keep half as much in the line's queue as four, so control messages wait half as
    long. Others halve their window at each loss, so it takes several: at 0.01 % loss on 1 Gb/s, 30 ms one
    cubic flow keeps 0.07 of the line, four keep 0.3.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return 2 if _use_bbr(sock) else 4


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``.

    Raises:
        ConnectError: If the text is neither.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ConnectError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value_s in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value_s)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_S * 1000)
    if not _use_bbr(sock):
        _log.debug("congestion control bbr is not available; the system's default is used")


def _use_bbr(sock: socket.socket) -> bool:
    """Whether the socket uses BBR: one flow keeps 0.86 of a 1 Gb/s line at 0.01 % loss, one of cubic 0.07."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except (OSError, AttributeError):  # not loaded, not allowed, or not Linux
        return False
    return True
