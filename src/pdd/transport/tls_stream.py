"""A ``Stream`` over a TLS connection, and the translation of what OpenSSL says went wrong.

OpenSSL's connection object must not be used by two threads at once, and a blocked read would keep a
sender out. So the socket does not block: a call holds the lock only while OpenSSL works, and waits for
the socket outside of it.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar, cast

from pdd.core.errors import ConnectionLostError, DeadlineError, TransportError, UntrustedPeerError
from pdd.transport.base import Buffer, Stream
from pdd.transport.sockets import count_segments, pace

_RECORD_BYTES: Final = 16 * 2**10
"""Most payload in one TLS record (RFC 8446, section 5.1)."""
_OPENSSL_HOLDS: Final = 17 * 2**10
"""OpenSSL may hold a part of one record, which then never comes to the socket again."""
_LOW_WATER: Final = 128 * 2**10
T = TypeVar("T")


class TlsStream(Stream):
    """Owns a TLS connection whose handshake is done and whose socket does not block."""

    def __init__(self, tls: ssl.SSLSocket, peer_address: str) -> None:
        self._tls = tls
        self._peer_address = peer_address
        self._peer_names = certificate_names(tls)
        self._ssl_lock = threading.Lock()
        self._lock = threading.Lock()
        self._num_users = 0
        self._low_water = 1
        self._is_closed = False

    @property
    def peer_address(self) -> str:
        """Where the other end is, for logs."""
        return self._peer_address

    @property
    def peer_names(self) -> frozenset[str]:
        """See ``Stream.peer_names``: the DNS names in the other end's certificate."""
        return self._peer_names

    def limit_rate(self, rate_bytes_per_s: float) -> None:
        """See ``Stream.limit_rate``."""
        pace(self._tls, rate_bytes_per_s)

    def segments(self) -> tuple[int, int] | None:
        """See ``Stream.segments``."""
        return count_segments(self._tls)

    def send(self, buffers: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        """See ``Stream.send``."""
        total = 0
        with self._using():
            for part in _joined(buffers):
                total += part.nbytes
                while part:
                    num_bytes = self._call(lambda part=part: self._tls.send(part), timeout_s)  # type: ignore[misc]
                    part = part[num_bytes:]
        return total

    def recv_into(self, buffer: memoryview, *, timeout_s: float | None = None) -> int:
        """See ``Stream.recv_into``."""
        with self._using():
            return self._call(lambda: self._tls.recv_into(buffer), timeout_s)

    def recv_exactly(self, buffer: memoryview) -> None:
        """See ``Stream.recv_exactly``."""
        # A sender writes record by record; this waits for many at once.
        filled = 0
        with self._using():
            while filled < buffer.nbytes:
                left = buffer.nbytes - filled
                num_bytes = self._call(
                    lambda filled=filled: self._read_ready(buffer[filled:]),  # type: ignore[misc]
                    None,
                    low_water=min(left - _OPENSSL_HOLDS, _LOW_WATER),
                )
                if num_bytes == 0:
                    raise ConnectionLostError(f"{self._peer_address} closed the connection")
                filled += num_bytes

    def _read_ready(self, buffer: memoryview) -> int:
        """What the socket has is in the buffer, record after record; 0 after the end.

        OpenSSL gives one record a call, so this loop runs 64 times a megabyte and does nothing else.

        Raises:
            SSLWantReadError: If the socket has nothing.
        """
        read, filled, size = self._tls.read, 0, buffer.nbytes
        try:
            while filled < size:
                num_bytes = cast("int", read(size - filled, buffer[filled:]))
                if not num_bytes:
                    break
                filled += num_bytes
        except ssl.SSLWantReadError:
            if not filled:
                raise
        return filled

    def _set_low_water(self, num_bytes: int) -> None:
        """The socket counts as readable only with so many bytes in it, or when it has ended."""
        if num_bytes != self._low_water:
            self._low_water = num_bytes
            with suppress(OSError):  # closed meanwhile
                self._tls.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def close(self) -> None:
        """See ``Stream.close``."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with self._ssl_lock, suppress(OSError, ValueError):
                self._tls.unwrap()  # says close_notify; its answer is not waited for
            with suppress(OSError):  # the peer was faster
                socket.socket.shutdown(self._tls, socket.SHUT_RDWR)  # SSLSocket's own forgets its TLS state
            self._close_if_unused()

    def _call(self, use: Callable[[], T], timeout_s: float | None, *, low_water: int = 1) -> T:
        """The result of a call to OpenSSL, repeated each time the socket is ready for more.

        Raises:
            DeadlineError: If one wait was too long.
            TransportError: If the connection has ended other than cleanly.
        """
        while True:
            try:
                with self._ssl_lock:
                    if self._is_closed:
                        raise ConnectionLostError("the connection was closed here")
                    return use()
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
                self._set_low_water(max(1, low_water))
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            except OSError as error:
                raise translate(error, self._peer_address) from error
            if not wait_ready(self._tls, wanted, timeout_s):
                raise DeadlineError(f"{self._peer_address} did not answer in {timeout_s} s")

    def _close_if_unused(self) -> None:
        if self._is_closed and self._num_users == 0:
            self._tls.close()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """The socket stays open until the call is over; see ``SocketStream``."""
        with self._lock:
            if self._is_closed:
                raise ConnectionLostError("the connection was closed here")
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                self._close_if_unused()


def shake_hands(tls: ssl.SSLSocket, address: str, *, timeout_s: float) -> None:
    """The handshake is done within the time, whatever the other end does.

    Raises:
        UntrustedPeerError: If one end does not trust the other, or the other does not speak TLS.
        DeadlineError: If it took too long.
        ConnectionLostError: If the connection ended.
    """
    tls.settimeout(0.0)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            tls.do_handshake()
            return
        except ssl.SSLWantReadError:
            wanted = select.POLLIN
        except ssl.SSLWantWriteError:
            wanted = select.POLLOUT
        except OSError as error:
            raise translate(error, address) from error
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not wait_ready(tls, wanted, left_s):
            raise DeadlineError(f"no TLS handshake with {address} in {timeout_s:g} s")


def wait_ready(sock: socket.socket, wanted: int, timeout_s: float | None) -> bool:
    """Whether the socket became ready in time; ended counts as ready."""
    poll = select.poll()
    poll.register(sock, wanted)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1000)))


def certificate_names(tls: ssl.SSLSocket) -> frozenset[str]:
    """The DNS names of the other end's verified certificate: the ids of the engines it speaks for."""
    certificate = tls.getpeercert() or {}
    names = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
    return frozenset(value for kind, value in names if kind == "DNS")


_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "BAD_RECORD_TYPE")
_ALERT: Final = "ALERT"


def translate(error: OSError, address: str) -> TransportError:
    """The error of our tree for one of ``ssl`` or the operating system."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UntrustedPeerError("certificate", f"the certificate of {address}: {error.verify_message}")
    is_end = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError)
    if is_end or not isinstance(error, ssl.SSLError):
        text = "ended without a TLS goodbye" if is_end else error.strerror
        return ConnectionLostError(f"connection to {address}: {text or error}")
    reason = error.reason or str(error)
    words = reason.replace("_", " ").lower()
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return UntrustedPeerError("no_certificate", f"{address} shows no certificate")
    if any(name in reason for name in _NOT_TLS):
        return UntrustedPeerError("not_tls", f"{address} does not speak TLS ({words})")
    if _ALERT in reason:
        return UntrustedPeerError("refused_by_peer", f"{address} refuses the connection: {words}")
    return UntrustedPeerError("tls", f"TLS with {address}: {words}")


def _joined(buffers: Sequence[Buffer]) -> Iterator[memoryview]:
    """The same bytes with no buffer far below a record's size, since every call makes a record of its own."""
    pending = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if pending or view.nbytes < _RECORD_BYTES:
            take = min(_RECORD_BYTES - len(pending), view.nbytes)
            pending += view[:take]
            view = view[take:]
            if len(pending) == _RECORD_BYTES:
                yield memoryview(pending)
                pending = bytearray()
        if view.nbytes >= _RECORD_BYTES:
            yield view
        else:
            pending += view
    if pending:
        yield memoryview(pending)
