"""The Unix socket between an engine and its agent, which also carries file descriptors."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from pdd.core.errors import ConfigurationError, ConnectError, ConnectionLostError
from pdd.transport.sockets import SocketStream

_MAX_FDS: Final = 4
_MAX_PATH_BYTES: Final = 107
"""``sun_path`` is 108 bytes with its end.

Source:
    unix(7).
"""


class UnixStream(SocketStream):
    """A connection over which the peer may hand file descriptors."""

    def recv_with_fds(self, max_bytes: int) -> tuple[bytes, list[int]]:
        """Some bytes and the descriptors that came with them; no bytes after a clean end.

        Raises:
            ConnectionLostError: If the connection ended other than cleanly, or was closed here.
        """
        with self._using(None) as sock:
            data, fds, _, _ = socket.recv_fds(sock, max_bytes, _MAX_FDS)
        return data, fds


class UnixListener:
    """Owns a listening socket and its path."""

    def __init__(self, path: Path) -> None:
        """The path is a socket that takes connections; one that a dead process left there is replaced.

        Raises:
            ConfigurationError: If the path is too long, is no socket, or is served by another process.
            ConnectError: If it cannot be bound.
        """
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigurationError(f"the path of a Unix socket has at most {_MAX_PATH_BYTES} bytes: {path}")
        self._path = path
        self._is_closed = False
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_stale(path)
            self._sock.bind(str(path))
            path.chmod(0o600)
            self._inode = path.stat().st_ino
            self._sock.listen(8)
        except OSError as error:
            self._sock.close()
            raise ConnectError(f"cannot listen on {path}: {error.strerror}") from error
        except ConfigurationError:
            self._sock.close()
            raise

    def accept(self) -> UnixStream:
        """The next connection.

        Raises:
            ConnectionLostError: If the listener was closed.
        """
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            raise ConnectionLostError(f"listener at {self._path}: {error.strerror}") from error
        return UnixStream(sock, str(self._path))

    def close(self) -> None:
        """No more connections are taken, and the path is gone unless another process has replaced it."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):  # nothing was blocked
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def _remove_stale(path: Path) -> None:
    """Nothing is at the path, unless somebody serves it."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ConfigurationError(f"{path} exists and is no socket")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(str(path))
    except OSError:
        path.unlink(missing_ok=True)
    else:
        raise ConfigurationError(f"another process serves {path}")
    finally:
        probe.close()
