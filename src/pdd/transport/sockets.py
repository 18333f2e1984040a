"""A ``Stream`` over any connected stream socket, and the translation of its OS errors."""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from pdd.core.errors import ConnectionLostError, DeadlineError
from pdd.transport.base import Buffer, Stream

_SO_MAX_PACING_RATE: Final = 47
"""From asm-generic/socket.h; Python's ``socket`` does not name it."""
_TCP_INFO_BYTES: Final = 160
_U32: Final = struct.Struct("=I")
_MAX_BUFFERS: Final = 512
"""Half of Linux's IOV_MAX, so that a call never exceeds it."""


class SocketStream(Stream):
    """Owns a connected blocking socket."""

    def __init__(self, sock: socket.socket, peer_address: str) -> None:
        self._sock = sock
        self._peer_address = peer_address
        self._timeout_s: float | None = None
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_closed = False
        sock.settimeout(None)

    @property
    def peer_address(self) -> str:
        """Where the other end is, for logs."""
        return self._peer_address

    def limit_rate(self, rate_bytes_per_s: float) -> None:
        """See ``Stream.limit_rate``."""
        pace(self._sock, rate_bytes_per_s)

    def segments(self) -> tuple[int, int] | None:
        """See ``Stream.segments``."""
        return count_segments(self._sock)

    def send(self, buffers: Sequence[Buffer], *, timeout_s: float | None = None) -> int:
        """See ``Stream.send``."""
        rest = [memoryview(buffer).cast("B") for buffer in buffers]
        total = sum(view.nbytes for view in rest)
        with self._using(timeout_s) as sock:
            while rest:
                _drop_sent(rest, sock.sendmsg(rest[:_MAX_BUFFERS]))
        return total

    def recv_into(self, buffer: memoryview, *, timeout_s: float | None = None) -> int:
        """See ``Stream.recv_into``."""
        with self._using(timeout_s) as sock:
            num_bytes = sock.recv_into(buffer)
        if num_bytes == 0 and self._is_closed:
            raise ConnectionLostError("the connection was closed here")
        return num_bytes

    def recv_exactly(self, buffer: memoryview) -> None:
        """See ``Stream.recv_exactly``."""
        # MSG_WAITALL on a blocking socket fills a piece of a megabyte in one call instead of several.
        filled = 0
        while filled < buffer.nbytes:
            with self._using(None) as sock:
                num_bytes = sock.recv_into(buffer[filled:], 0, socket.MSG_WAITALL)
            if num_bytes == 0:
                raise ConnectionLostError(f"{self._peer_address} closed the connection")
            filled += num_bytes

    def close(self) -> None:
        """See ``Stream.close``."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with suppress(OSError):  # the peer was faster
                self._sock.shutdown(socket.SHUT_RDWR)
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and self._num_users == 0:
            self._sock.close()

    @contextmanager
    def _using(self, timeout_s: float | None) -> Iterator[socket.socket]:
        """The socket, kept open until the call is over: a file descriptor closed under a blocked call
        could be reused by another connection.
        """
        with self._lock:
            if self._is_closed:
                raise ConnectionLostError("the connection was closed here")
            self._num_users += 1
            if timeout_s != self._timeout_s:
                self._sock.settimeout(timeout_s)
                self._timeout_s = timeout_s
        try:
            yield self._sock
        except TimeoutError as error:
            raise DeadlineError(f"{self._peer_address} did not answer in {timeout_s} s") from error
        except OSError as error:
            raise ConnectionLostError(f"connection to {self._peer_address}: {error.strerror}") from error
        finally:
            with self._lock:
                self._num_users -= 1
                self._close_if_unused()


def pace(sock: socket.socket, rate_bytes_per_s: float) -> None:
    """The kernel spreads what the socket sends over time, if it can pace TCP.

    Source:
        socket(7), ``SO_MAX_PACING_RATE``: 64 bits wide since Linux 4.20; TCP paces by itself where the
        interface has no ``fq`` queue.
    """
    with suppress(OSError):  # closed meanwhile, or another system
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, min(int(rate_bytes_per_s), 2**31 - 1))


def count_segments(sock: socket.socket) -> tuple[int, int] | None:
    """Data segments a TCP socket has sent, those sent again included, and how many were sent again.

    Source:
        ``struct tcp_info`` of linux/tcp.h: ``tcpi_total_retrans`` at byte 100, ``tcpi_data_segs_out`` at 156,
        both since Linux 4.6; the structure only ever grows at its end.
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # closed meanwhile, or not TCP
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    (num_again,) = _U32.unpack_from(info, 100)
    (num_sent,) = _U32.unpack_from(info, 156)
    return num_sent, num_again


def _drop_sent(rest: list[memoryview], num_bytes: int) -> None:
    """The first ``num_bytes`` are no longer in the list."""
    num_whole = 0
    for view in rest:
        if view.nbytes > num_bytes:
            break
        num_bytes -= view.nbytes
        num_whole += 1
    del rest[:num_whole]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
