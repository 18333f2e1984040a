import os
import socket
import threading
from pathlib import Path

import pytest

from pdd.core.errors import ConfigurationError, ConnectionLostError
from pdd.transport.unix import UnixListener


def test_descriptors_arrive_with_their_bytes(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "s")
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(tmp_path / "s"))
    stream = listener.accept()
    fd = os.memfd_create("x")
    os.write(fd, b"shared")
    socket.send_fds(client, [b"hello"], [fd])
    data, fds = stream.recv_with_fds(100)
    assert data == b"hello"
    assert os.pread(fds[0], 100, 0) == b"shared"
    client.close()
    assert stream.recv_with_fds(100) == (b"", [])
    for descriptor in (fd, *fds):
        os.close(descriptor)
    stream.close()
    listener.close()
    assert not (tmp_path / "s").exists()


def test_a_socket_file_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    listener = UnixListener(path)
    listener.close()


def test_a_socket_that_is_served_is_not_stolen(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "s")
    with pytest.raises(ConfigurationError, match="another process"):
        UnixListener(tmp_path / "s")
    listener.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(ConfigurationError, match="no socket"):
        UnixListener(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "precious"


def test_a_path_that_is_too_long_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="107 bytes"):
        UnixListener(tmp_path / ("s" * 120))


def test_only_the_owner_may_connect(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "new" / "s")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "s").stat().st_mode & 0o777 == 0o600
    listener.close()


def test_close_wakes_accept(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "s")
    errors: list[Exception] = []

    def accept() -> None:
        try:
            listener.accept()
        except ConnectionLostError as error:
            errors.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    listener.close()
    thread.join(30)
    assert errors
