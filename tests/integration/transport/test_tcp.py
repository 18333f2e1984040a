import socket

import pytest
from tests.kit.transport_conformance import TransportConformance, in_thread

from pdd.core.errors import ConnectError
from pdd.transport.base import Transport
from pdd.transport.tcp import TcpTransport, join_address, split_address


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


class TestTcp(TransportConformance):
    def make_transport(self) -> Transport:
        return TcpTransport()

    def listen_address(self) -> str:
        return "127.0.0.1:0"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
class TestTcpV6(TestTcp):
    def listen_address(self) -> str:
        return "[::1]:0"


class TestTcpByName(TestTcp):
    def listen_address(self) -> str:
        return "localhost:0"


def test_sockets_are_tuned_for_the_line() -> None:
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near = transport.dial(listener.address, timeout_s=5)
    far = listener.accept()
    for stream in (near, far):
        sock = stream._sock  # type: ignore[attr-defined]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, interval_s, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle_s + interval_s * count < 60
        stream.close()
    listener.close()


@pytest.mark.parametrize("address", ["nohost", "host:", "host:x", "host:70000", ":::"])
def test_what_is_no_address_cannot_be_dialled(address: str) -> None:
    with pytest.raises(ConnectError):
        TcpTransport().dial(address, timeout_s=1)


def test_an_unknown_name_is_a_connect_error() -> None:
    with pytest.raises(ConnectError, match="no-such-host"):
        TcpTransport().dial("no-such-host.invalid:1", timeout_s=5)


@pytest.mark.parametrize(("host", "port", "text"), [("a.b", 1, "a.b:1"), ("::1", 65535, "[::1]:65535")])
def test_addresses_are_written_as_they_are_read(host: str, port: int, text: str) -> None:
    assert join_address(host, port) == text
    assert split_address(text) == (host, port)


def test_segments_are_counted() -> None:
    transport = TcpTransport()
    listener = transport.listen("127.0.0.1:0")
    near, far = transport.dial(listener.address, timeout_s=5), listener.accept()
    thread = in_thread(lambda: near.send([bytes(2**20)]))
    far.recv_exactly(memoryview(bytearray(2**20)))
    thread.join()
    counts = near.segments()
    assert counts is not None
    assert counts[0] >= 2**20 // 65536
    assert counts[1] <= counts[0]
    near.close()
    assert near.segments() is None
    far.close()
    listener.close()
