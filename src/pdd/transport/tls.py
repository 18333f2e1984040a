"""TLS 1.3 over TCP with certificates on both sides: the transport between sites.

An engine's id is a DNS name in its certificate. Who dials or accepts learns from ``Stream.peer_names`` who
is at the other end; that it is the right one is for those to check who know whom they expect.
"""

import logging
import queue
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from pdd.core.errors import (
    ConnectError,
    ConnectionLostError,
    DeadlineError,
    TransportError,
    UntrustedPeerError,
)
from pdd.transport.base import Listener, Stream, Transport
from pdd.transport.credentials import Credentials, TlsFiles
from pdd.transport.tcp import TcpListener, bind_socket, connect_socket
from pdd.transport.tls_stream import TlsStream, shake_hands

_log = logging.getLogger(__name__)
_HANDSHAKE_S: Final = 5.0
_MAX_HALF_OPEN: Final = 64
"""Handshakes at once. One more ends the oldest: an honest peer is through in a few round trips."""
_LINGER_S: Final = 0.5
"""How long the alert of a failed handshake is given to reach the peer before the socket is closed."""


class TlsTransport(Transport):
    """Dials and listens with one engine's certificate.

    Raises:
        ConfigurationError: Naming the file that cannot be used.
    """

    def __init__(
        self, files: TlsFiles, *, handshake_s: float = _HANDSHAKE_S, max_half_open: int = _MAX_HALF_OPEN
    ) -> None:
        self._credentials = Credentials(files)
        self._handshake_s = handshake_s
        self._max_half_open = max_half_open

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """See ``Transport.dial``."""
        start_s = time.monotonic()
        sock = connect_socket(address, timeout_s=timeout_s)
        left_s = max(0.1, timeout_s - (time.monotonic() - start_s))
        tls: ssl.SSLSocket | None = None
        try:
            tls = wrap(self._credentials.contexts().client, sock, address)
            shake_hands(tls, address, timeout_s=left_s)
            return TlsStream(tls, address)
        except (DeadlineError, ConnectionLostError) as error:
            (tls or sock).close()
            raise ConnectError(f"{error}; is the port at {address} without TLS?") from error
        except UntrustedPeerError:
            (tls or sock).close()
            raise

    def listen(self, address: str) -> Listener:
        """See ``Transport.listen``."""
        return TlsListener(
            TcpListener(bind_socket(address)),
            self._credentials,
            handshake_s=self._handshake_s,
            max_half_open=self._max_half_open,
        )


class TlsListener(Listener):
    """Owns a TCP listener and the handshakes of what it accepted."""

    def __init__(
        self, tcp: TcpListener, credentials: Credentials, *, handshake_s: float, max_half_open: int
    ) -> None:
        self._tcp = tcp
        self._credentials = credentials
        self._handshake_s = handshake_s
        self._max_half_open = max_half_open
        self._ready: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._half_open: OrderedDict[ssl.SSLSocket, bool] = OrderedDict()
        """Connections in their handshake, oldest first, and whether they were ended to make room."""
        self._refusals: Counter[str] = Counter()
        self._is_closed = False
        threading.Thread(target=self._run, name="pdd-tls-accept", daemon=True).start()

    @property
    def address(self) -> str:
        """See ``Listener.address``."""
        return self._tcp.address

    @property
    def refusals(self) -> Mapping[str, int]:
        """See ``Listener.refusals``."""
        with self._lock:
            return dict(self._refusals)

    @property
    def num_half_open(self) -> int:
        """Connections whose handshake is not done."""
        with self._lock:
            return len(self._half_open)

    def accept(self) -> Stream:
        """See ``Listener.accept``."""
        stream = self._ready.get()
        if stream is None:
            self._ready.put(None)  # for the next caller
            raise ConnectionLostError(f"listener at {self.address} is closed")
        return stream

    def close(self) -> None:
        """See ``Listener.close``."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for tls in self._half_open:
                _shut(tls)
        self._tcp.close()
        with suppress(queue.Empty):
            while stream := self._ready.get_nowait():
                stream.close()
        self._ready.put(None)

    def _run(self) -> None:
        """Connections have been taken until the listener was closed."""
        while True:
            try:
                sock, address = self._tcp.accept_socket()
            except ConnectionLostError as error:
                if not self._is_closed:
                    _log.error("no more connections are taken: %s", error)
                self._ready.put(None)
                return
            try:
                tls = wrap(self._credentials.contexts().server, sock, address, is_server=True)
            except ConnectionLostError:
                sock.close()  # reset before its turn came
                continue
            self._admit(tls)
            threading.Thread(target=self._greet, args=(tls, address), name="pdd-tls-in", daemon=True).start()

    def _admit(self, tls: ssl.SSLSocket) -> None:
        with self._lock:
            waiting = [tls for tls, is_evicted in self._half_open.items() if not is_evicted]
            if len(waiting) >= self._max_half_open:
                self._half_open[waiting[0]] = True
                _shut(waiting[0])
            self._half_open[tls] = False
            if self._is_closed:
                _shut(tls)

    def _greet(self, tls: ssl.SSLSocket, address: str) -> None:
        """The connection is ready to be accepted, or closed and counted."""
        try:
            shake_hands(tls, address, timeout_s=self._handshake_s)
        except TransportError as error:
            self._refuse(tls, address, error)
            _linger(tls)
            return
        stream = TlsStream(tls, address)
        with self._lock:
            del self._half_open[tls]
            if not self._is_closed:
                self._ready.put(stream)
                return
        stream.close()

    def _refuse(self, tls: ssl.SSLSocket, address: str, error: TransportError) -> None:
        with self._lock:
            is_evicted = self._half_open.pop(tls)
            if self._is_closed:
                return
            reason, text = refusal_reason(error), str(error)
            if is_evicted:
                reason, text = "too_many", f"{address}: more than {self._max_half_open} handshakes at once"
            _log.warning("connection refused (%s): %s", reason, text)  # first: who sees the count finds why
            self._refusals[reason] += 1


def refusal_reason(error: TransportError) -> str:
    """The word that metrics count a failed handshake under."""
    if isinstance(error, UntrustedPeerError):
        return error.reason
    return "handshake_timeout" if isinstance(error, DeadlineError) else "handshake_lost"


def wrap(
    context: ssl.SSLContext, sock: socket.socket, address: str, *, is_server: bool = False
) -> ssl.SSLSocket:
    """A TLS socket that owns the connection; its handshake is still to come.

    Raises:
        ConnectionLostError: If the connection has ended; the caller still owns the socket.
    """
    try:
        return context.wrap_socket(
            sock, server_side=is_server, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
    except (OSError, ValueError) as error:
        raise ConnectionLostError(f"connection to {address}: {error}") from error


def _linger(tls: ssl.SSLSocket) -> None:
    """The socket is closed, but the peer could read the alert before: unread bytes would make it a reset."""
    with socket.socket(fileno=tls.detach()) as sock, suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(_LINGER_S)
        deadline_s = time.monotonic() + _LINGER_S
        while time.monotonic() < deadline_s and sock.recv(65536):
            pass


def _shut(tls: ssl.SSLSocket) -> None:
    """Whoever waits for the socket is woken; its TLS state is left to them."""
    with suppress(OSError):
        socket.socket.shutdown(tls, socket.SHUT_RDWR)
