"""TLS between two ends that trust each other, and every way in which they may not."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.agent_fleet import wait_for
from tests.kit.certificates import Pki
from tests.kit.transport_conformance import TransportConformance, received

from pdd.core.errors import ConfigurationError, ConnectError, TransportError, UntrustedPeerError
from pdd.transport.base import Listener, Transport
from pdd.transport.tcp import TcpTransport, split_address
from pdd.transport.tls import TlsListener, TlsTransport


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


class TestTls(TransportConformance):
    @pytest.fixture(autouse=True)
    def _files(self, pki: Pki) -> None:
        self._pki = pki

    def make_transport(self) -> Transport:
        return TlsTransport(self._pki.files("p0"))

    def listen_address(self) -> str:
        return "127.0.0.1:0"

    def test_both_ends_use_one_connection_at_once(self, transport: Transport, listener: Listener) -> None:
        """A thread that sends and one that receives at each end: TLS state must not be shared unguarded."""
        near = transport.dial(listener.address, timeout_s=10)
        far = listener.accept()
        data = bytes(range(256)) * 2**14
        threads = [threading.Thread(target=s.send, args=([data],)) for s in (near, far)]
        got: list[bytes] = []
        threads += [
            threading.Thread(target=lambda s=s: got.append(received(s, len(data)))) for s in (near, far)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == [data, data]
        near.close()
        far.close()


@pytest.fixture
def md(pki: Pki) -> Iterator[TlsListener]:
    before = set(threading.enumerate())
    # A busy machine must not make a slow handshake of one that is wrong.
    transport = TlsTransport(pki.files("md0"), handshake_s=60, max_half_open=4)
    listener = transport.listen("127.0.0.1:0")
    assert isinstance(listener, TlsListener)
    yield listener
    listener.close()
    wait_for(lambda: not [t for t in threading.enumerate() if t not in before], "all threads to end")


@contextlib.contextmanager
def hasty(md: TlsListener) -> Iterator[None]:
    """Handshakes have little time meanwhile."""
    patient_s, md._handshake_s = md._handshake_s, 0.6
    yield
    md._handshake_s = patient_s


def check_clean(md: TlsListener, pki: Pki) -> None:
    """The next honest peer is served, and no handshake is left behind."""
    near = TlsTransport(pki.files("p0")).dial(md.address, timeout_s=10)
    far = md.accept()
    near.send([b"hello"])
    assert received(far, 5) == b"hello"
    assert near.peer_names == {"md0"}
    assert far.peer_names == {"p0"}
    near.close()
    far.close()
    wait_for(lambda: md.num_half_open == 0, "no handshake to be open")


def talk(transport: Transport, address: str) -> None:
    """As an agent does: the peer's refusal comes with the dial or with the first read."""
    stream = transport.dial(address, timeout_s=60)
    try:
        stream.send([b"hello"])
        stream.recv_into(memoryview(bytearray(1)), timeout_s=60)
    finally:
        stream.close()


def test_an_unknown_ca_is_refused_by_the_dialling_side(md: TlsListener, pki: Pki, tmp_path: Path) -> None:
    other = TlsTransport(Pki(tmp_path / "other").files("p0"))
    with pytest.raises(UntrustedPeerError, match="the certificate of"):
        talk(other, md.address)
    wait_for(lambda: md.refusals, "the refusal to be counted")
    check_clean(md, pki)


def test_an_unknown_ca_is_refused_by_the_accepting_side(md: TlsListener, pki: Pki, tmp_path: Path) -> None:
    files = Pki(tmp_path / "other").files("p0")
    files.ca.write_bytes((pki.folder / "ca.crt").read_bytes())
    with pytest.raises(UntrustedPeerError, match="unknown ca"):
        talk(TlsTransport(files), md.address)
    wait_for(lambda: md.refusals == {"certificate": 1}, "the refusal to be counted")
    check_clean(md, pki)


def test_an_expired_certificate_is_refused_and_named(
    md: TlsListener, pki: Pki, caplog: pytest.LogCaptureFixture
) -> None:
    expired = TlsTransport(pki.files("p1", expired=True))
    with pytest.raises(UntrustedPeerError, match="certificate expired"):
        talk(expired, md.address)
    wait_for(lambda: md.refusals == {"certificate": 1}, "the refusal to be counted")
    assert "certificate has expired" in caplog.text
    check_clean(md, pki)


def test_an_expired_certificate_of_the_accepting_side_is_named(pki: Pki) -> None:
    listener = TlsTransport(pki.files("md1", expired=True)).listen("127.0.0.1:0")
    with pytest.raises(UntrustedPeerError, match="certificate has expired"):
        TlsTransport(pki.files("p0")).dial(listener.address, timeout_s=5)
    listener.close()


def test_no_certificate_is_refused(md: TlsListener, pki: Pki) -> None:
    context = ssl.create_default_context(cafile=pki.folder / "ca.crt")
    context.check_hostname = False
    with socket.create_connection(split_address(md.address)) as sock:
        sock.settimeout(10)
        with context.wrap_socket(sock) as tls, pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
            tls.recv(1)
    wait_for(lambda: md.refusals == {"no_certificate": 1}, "the refusal to be counted")
    check_clean(md, pki)


def test_tls_below_1_3_is_refused(md: TlsListener, pki: Pki) -> None:
    files = pki.files("p0")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(split_address(md.address)) as sock,
        pytest.raises(ssl.SSLError),
        context.wrap_socket(sock),
    ):
        pass
    check_clean(md, pki)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 5000, b"\x16\x03\x01\xff\xff" + bytes(100)]
)
def test_garbage_instead_of_tls_is_refused(md: TlsListener, pki: Pki, garbage: bytes) -> None:
    # The answer may be an alert or the end; a reset says the same.
    with socket.create_connection(split_address(md.address)) as sock, contextlib.suppress(OSError):
        sock.settimeout(10)
        sock.sendall(garbage)
        while sock.recv(1000):
            pass
    wait_for(lambda: sum(md.refusals.values()) == 1, "the refusal to be counted")
    check_clean(md, pki)


def test_a_plain_client_is_refused(md: TlsListener, pki: Pki) -> None:
    with contextlib.suppress(TransportError):
        talk(TcpTransport(), md.address)
    wait_for(lambda: sum(md.refusals.values()) == 1, "the refusal to be counted")
    check_clean(md, pki)


def test_a_plain_port_is_named_as_such(pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(10)
                sock.sendall(b"what?" * 10)

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransportError, match="TLS"):
            TlsTransport(pki.files("p0")).dial(address, timeout_s=5)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
def test_a_peer_that_does_not_finish_its_handshake_is_dropped_in_time(
    md: TlsListener, pki: Pki, sent: bytes
) -> None:
    with hasty(md), socket.create_connection(split_address(md.address)) as sock:
        sock.settimeout(60)
        sock.sendall(sent)
        assert sock.recv(1000) == b""
        wait_for(lambda: md.refusals == {"handshake_timeout": 1}, "the refusal to be counted")
    check_clean(md, pki)


def test_a_byte_at_a_time_does_not_stretch_the_deadline(md: TlsListener, pki: Pki) -> None:
    hello = _client_hello()
    with hasty(md):
        with socket.create_connection(split_address(md.address)) as sock, contextlib.suppress(OSError):
            for byte in hello[:-1]:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)  # slower than the deadline for the whole, faster than it for each byte
        wait_for(lambda: md.refusals == {"handshake_timeout": 1}, "the deadline")
    check_clean(md, pki)


def test_half_open_connections_are_bounded_and_honest_peers_get_through(md: TlsListener, pki: Pki) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(split_address(md.address)))
        wait_for(lambda: md.refusals.get("too_many", 0) >= 16, "the oldest to be dropped")
        near = TlsTransport(pki.files("p0")).dial(md.address, timeout_s=10)
        md.accept().close()
        near.close()
    check_clean(md, pki)


def test_a_peer_that_resets_hurts_nobody(md: TlsListener, pki: Pki) -> None:
    for _ in range(10):
        sock = socket.create_connection(split_address(md.address))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()
    check_clean(md, pki)


def test_renewed_files_are_used_without_a_restart(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    md, p = TlsTransport(pki.files("md0")), TlsTransport(pki.files("p0"))
    listener = md.listen("127.0.0.1:0")

    def names() -> tuple[frozenset[str] | None, frozenset[str] | None]:
        near = p.dial(listener.address, timeout_s=10)
        far = listener.accept()
        seen = near.peer_names, far.peer_names
        near.close()
        far.close()
        return seen

    assert names() == ({"md0"}, {"p0"})
    pki.files("md9", as_file="md0")
    pki.files("p9", as_file="p0")
    assert names() == ({"md9"}, {"p9"})
    listener.close()


def test_broken_new_files_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pki = Pki(tmp_path)
    files = pki.files("md0")
    md, p = TlsTransport(files), TlsTransport(pki.files("p0"))
    listener = md.listen("127.0.0.1:0")
    for break_it in _ways_to_break(files.cert):
        break_it()
        near = p.dial(listener.address, timeout_s=10)
        assert near.peer_names == {"md0"}
        listener.accept().close()
        near.close()
    assert "md0.crt" in caplog.text
    listener.close()


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_file_that_cannot_be_used_is_named_at_start(
    tmp_path: Path, which: str, content: bytes | None
) -> None:
    files = Pki(tmp_path).files("md0")
    path: Path = getattr(files, which)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=path.name):
        TlsTransport(files)


def test_a_silent_port_is_a_connect_error(pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConnectError, match="without TLS"):
            TlsTransport(pki.files("p0")).dial(address, timeout_s=0.3)


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    tls = context.wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def _ways_to_break(path: Path) -> list[Callable[[], object]]:
    return [lambda: path.write_bytes(b"half a certifi"), path.unlink]
