"""Peers that are not who they should be, or nobody we know: refused, named, and no trouble for the others."""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.agent.conftest import Fleet
from tests.kit.agent_fleet import WAIT_S, RunningAgent, tls_config, wait_for
from tests.kit.certificates import Pki
from tests.kit.engine_side import FakeEngine

from pdd.config.schema import PddConfig
from pdd.transport.choice import choose_transport
from pdd.transport.tcp import TcpTransport, split_address
from pdd.wire.frames import KIND_CONTROL, MAGIC, PREFIX, WIRE_VERSION, Hello, Ping, encode_control


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    pki = Pki(tmp_path / "pki")
    for engine_id in ("p0", "md0"):
        pki.files(engine_id)
    return pki


def link_of(agent: RunningAgent, peer: str = "md0") -> dict:
    return next(link for link in agent.agent.state()["peers"] if link["peer"] == peer)


def wait_until_up(agent: RunningAgent) -> None:
    """The link is up; it is wanted now, so that a test does not wait out the back-off."""
    assert agent.agent.space is not None
    agent.agent.space.links["md0"].warm()
    wait_for(lambda: link_of(agent)["state"] == "up", "the link")


def refused(agent: RunningAgent) -> dict[str, int]:
    return agent.agent.state()["refused"]


def check_next_is_clean(p: RunningAgent, prefill: FakeEngine, main: FakeEngine, name: str = "clean") -> None:
    prefill.push(name, ["md0"], [f"{name}-{i}" for i in range(5)])
    p.wait_event("landed", transfer=name)
    main.check_load([f"{name}-{i}" for i in range(5)])


def other_tls(config: PddConfig, certs: Path | None, *, mode: str = "on") -> PddConfig:
    """The same fleet as read by an agent whose [tls] is another."""
    tls = tls_config(certs).model_copy(update={"mode": mode})
    return config.model_copy(update={"tls": tls})


def test_a_transfer_over_tls_lands_exact(fleet: Fleet, pki: Pki) -> None:
    p, md = fleet.agents(certs=pki.folder)
    main, prefill = md.engine(), p.engine()
    prefill.push("t", ["md0"], range(40))
    landed = p.wait_event("landed", transfer="t")
    assert landed["payload_bytes"] == 40 * 4096
    main.check_load(range(40))
    assert refused(md) == {}


def test_a_cut_under_tls_is_survived(fleet: Fleet, pki: Pki) -> None:
    fleet.configure(certs=pki.folder, store_bytes=64 * 2**20)
    meddler = fleet.meddle("md0")
    p, md = fleet.agent("p0"), fleet.agent("md0")
    main, prefill = md.engine(chunk_bytes=2**16), p.engine(chunk_bytes=2**16)

    def hold_in_the_middle(_index: int, _at: int, data: bytes) -> bytes:
        if meddler.num_forward_bytes > 4 * 2**20:
            meddler.hold()
        return data

    meddler.tamper = hold_in_the_middle
    prefill.push("t", ["md0"], range(200))
    wait_for(lambda: meddler.num_forward_bytes > 4 * 2**20, "the middle")
    meddler.tamper = None
    meddler.cut()
    meddler.let_go()
    p.wait_event("landed", transfer="t")
    main.check_load(range(200))


def test_a_flipped_byte_under_tls_ends_the_connection_and_nothing_else(fleet: Fleet, pki: Pki) -> None:
    fleet.configure(certs=pki.folder, store_bytes=64 * 2**20)
    meddler = fleet.meddle("md0")
    p, md = fleet.agent("p0"), fleet.agent("md0")
    main, prefill = md.engine(chunk_bytes=2**16), p.engine(chunk_bytes=2**16)
    flipped: list[int] = []

    def flip(_index: int, at: int, data: bytes) -> bytes:
        if not flipped and at > 200_000 and len(data) > 1000:
            flipped.append(at)
            return data[:500] + bytes([data[500] ^ 1]) + data[501:]
        return data

    meddler.tamper = flip
    prefill.push("t", ["md0"], range(100))
    p.wait_event("landed", transfer="t")
    assert flipped
    main.check_load(range(100))
    assert md.agent.space.inbound.counters.corrupt_pieces == 0  # type: ignore[union-attr]


class TestUntrusted:
    """One side's certificate is wrong; then it is mended, without a restart."""

    @pytest.fixture
    def wrong(self, fleet: Fleet, pki: Pki, tmp_path: Path) -> Path:
        fleet.configure(certs=pki.folder, stall_timeout_s=60)
        return tmp_path / "wrong"

    def _check(self, p: RunningAgent, md: RunningAgent, *, words: str, reasons: set[str]) -> None:
        _main, prefill = md.engine(), p.engine()
        prefill.push("t", ["md0"], range(3))
        stalled = p.wait_event("stalled", transfer="t")
        assert words in stalled["detail"]
        p.give_up_after(2)
        failed = p.wait_event("failed", transfer="t")
        assert failed["reason"] == "peer_down"
        assert words in failed["detail"]
        assert link_of(p)["state"] == "down"
        assert words in link_of(p)["reason"]
        wait_for(lambda: link_of(p)["breaker"] == "open", "the breaker")
        assert set(refused(md)) & reasons
        assert md.agent.state()["transfers"] == 0
        p.give_up_after(60)

    def test_an_expired_certificate(self, fleet: Fleet, pki: Pki, wrong: Path) -> None:
        pki.files("p0", expired=True)
        p, md = fleet.agent("p0"), fleet.agent("md0")
        self._check(p, md, words="expired", reasons={"certificate"})
        pki.files("p0")
        wait_until_up(p)
        check_next_is_clean(p, p.engines[0], md.engines[0])

    def test_a_wrong_ca(self, fleet: Fleet, pki: Pki, wrong: Path) -> None:
        other = Pki(wrong)
        other.files("p0")
        p = fleet.agent("p0", config=other_tls(fleet.config, wrong))
        md = fleet.agent("md0")
        self._check(p, md, words="certificate", reasons={"refused_by_peer", "tls"})
        for name in ("p0.crt", "p0.key", "ca.crt"):
            (wrong / name).write_bytes((pki.folder / name).read_bytes())
        pki.files("p0")
        (wrong / "p0.crt").write_bytes((pki.folder / "p0.crt").read_bytes())
        (wrong / "p0.key").write_bytes((pki.folder / "p0.key").read_bytes())
        wait_until_up(p)
        check_next_is_clean(p, p.engines[0], md.engines[0])

    def test_a_sender_with_another_engines_certificate(self, fleet: Fleet, pki: Pki, wrong: Path) -> None:
        pki.files("p9", as_file="p0")
        p, md = fleet.agent("p0"), fleet.agent("md0")
        self._check(p, md, words="claims p0, its certificate is for p9", reasons={"identity"})

    def test_a_receiver_with_another_engines_certificate(self, fleet: Fleet, pki: Pki, wrong: Path) -> None:
        pki.files("md9", as_file="md0")
        p, md = fleet.agent("p0"), fleet.agent("md0")
        main, prefill = md.engine(), p.engine()
        prefill.push("t", ["md0"], range(3))
        assert "answers md9 instead of md0" in p.wait_event("stalled", transfer="t")["detail"]
        p.give_up_after(2)
        assert "answers md9 instead of md0" in p.wait_event("failed", transfer="t")["detail"]
        p.give_up_after(60)
        pki.files("md0")
        wait_until_up(p)
        check_next_is_clean(p, prefill, main)

    def test_a_plain_sender_and_a_tls_port(self, fleet: Fleet, pki: Pki, wrong: Path) -> None:
        p = fleet.agent("p0", config=other_tls(fleet.config, None, mode="off"))
        md = fleet.agent("md0")
        self._check(p, md, words="TLS", reasons={"not_tls"})

    def test_a_tls_sender_and_a_plain_port(self, fleet: Fleet, pki: Pki, wrong: Path) -> None:
        p = fleet.agent("p0")
        md = fleet.agent("md0", config=other_tls(fleet.config, None, mode="off"))
        self._check(p, md, words="TLS", reasons={"garbage"})
        assert "speaks TLS" in str(md.agent.state()["refused_lately"])


def test_certificates_are_renewed_under_load(fleet: Fleet, pki: Pki) -> None:
    fleet.configure(certs=pki.folder)
    meddler = fleet.meddle("md0")
    p, md = fleet.agent("p0"), fleet.agent("md0")
    main, prefill = md.engine(), p.engine()
    for turn in range(3):
        for engine_id in ("p0", "md0"):
            pki.files(engine_id)
        meddler.cut()
        check_next_is_clean(p, prefill, main, f"turn-{turn}")


class TestStrangers:
    """Nobody we know, on a port without TLS, where HELLO is the first thing to be refused."""

    @pytest.fixture
    def pair(self, fleet: Fleet) -> Iterator[tuple[RunningAgent, RunningAgent]]:
        fleet.configure()
        md = fleet.agent("md0", handshake_s=60)
        p = fleet.agent("p0")
        self.main, self.prefill = md.engine(), p.engine()
        md.wait_connected()  # a peer that is known: else it might be dropped among the strangers
        yield p, md
        check_next_is_clean(p, self.prefill, self.main)
        # One control connection and two streams; nothing else is left.
        wait_for(lambda: md.agent._num_connections == 3, "the strangers to be gone")

    def address(self, md: RunningAgent) -> tuple[str, int]:
        return split_address(md.config.engine("md0").data_address)

    @pytest.mark.parametrize("length", [2**31, 2**32 - 1, 2**20, 0])
    def test_a_huge_length_is_refused_before_memory_is_taken(
        self, pair: tuple[RunningAgent, RunningAgent], length: int
    ) -> None:
        _, md = pair
        with socket.create_connection(self.address(md)) as sock:
            sock.settimeout(10)
            sock.sendall(PREFIX.pack(MAGIC, KIND_CONTROL, 0, length, 0))
            assert sock.recv(1000) == b""
        assert refused(md) == {"garbage": 1}

    @pytest.mark.parametrize("garbage", [b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", struct.pack("<Q", 7) * 9])
    def test_garbage(self, pair: tuple[RunningAgent, RunningAgent], garbage: bytes) -> None:
        _, md = pair
        with socket.create_connection(self.address(md)) as sock, contextlib.suppress(ConnectionError):
            sock.settimeout(10)
            sock.sendall(garbage)
            assert sock.recv(1000) == b""
        wait_for(lambda: refused(md) == {"garbage": 1}, "the refusal")

    def test_a_hello_that_trickles_in_is_dropped_in_time(
        self, pair: tuple[RunningAgent, RunningAgent]
    ) -> None:
        _, md = pair
        md.agent._handshake_s = 0.4
        hello = encode_control(
            Hello(version=WIRE_VERSION, peer="x", session="s", stream=0, fingerprint={"a": "b" * 5000})
        )
        num_taken = 0
        with socket.create_connection(self.address(md)) as sock, contextlib.suppress(OSError):
            for byte in hello[:-1]:
                sock.sendall(bytes([byte]))
                num_taken += 1
                time.sleep(0.01)
        assert num_taken < len(hello) - 1
        wait_for(lambda: refused(md) == {"hello_timeout": 1}, "the refusal")

    def test_silent_strangers_are_bounded(self, pair: tuple[RunningAgent, RunningAgent]) -> None:
        p, md = pair
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(self.address(md)))
            wait_for(lambda: refused(md) == {"too_many": 100 - 64}, "the oldest to be dropped")
            check_next_is_clean(p, self.prefill, self.main, "meanwhile")

    def test_another_version_is_named_on_both_sides(self, pair: tuple[RunningAgent, RunningAgent]) -> None:
        _, md = pair
        hello = Hello(version=WIRE_VERSION + 1, peer="new", session="s", stream=0, fingerprint={})
        with socket.create_connection(self.address(md)) as sock:
            sock.sendall(encode_control(hello))
            sock.settimeout(10)
            assert b"version" in sock.recv(1000)
        assert md.agent.state()["refused_lately"][-1]["peer"] == "new"

    def test_another_frame_than_hello(self, pair: tuple[RunningAgent, RunningAgent]) -> None:
        _, md = pair
        with socket.create_connection(self.address(md)) as sock:
            sock.sendall(encode_control(Ping(nonce=1)))
            sock.settimeout(10)
            assert sock.recv(1000) == b""
        assert refused(md) == {"garbage": 1}


def test_an_address_that_leads_to_another_agent_is_named(fleet: Fleet) -> None:
    fleet.configure("p0", "md0", "md1", stall_timeout_s=60)
    where = fleet.config.engine("md1").data_address
    engines = tuple(
        e.model_copy(update={"advertise": where}) if e.id == "md0" else e for e in fleet.config.engines
    )
    fleet.config = fleet.config.model_copy(update={"engines": engines})
    p, md1 = fleet.agent("p0"), fleet.agent("md1")
    md1.engine()
    prefill = p.engine()
    prefill.push("t", ["md0"], range(3))
    prefill.push("right", ["md1"], range(3))
    p.wait_event("stalled", transfer="t")
    p.give_up_after(2)
    p.wait_event("failed", transfer="t")
    p.wait_event("landed", transfer="right")
    reasons = {event["reason"] for event in p.events("link") if event["peer"] == "md0"} - {None}
    assert len(reasons) == 1
    assert f"at {where} answers md1 instead of md0" in reasons.pop()
    # The wrong attempts end nobody's session: the link that is rightly there was made once.
    assert p.agent.space is not None
    links = p.agent.space.links
    wait_for(lambda: links["md0"].attempts["untrusted"] > 1, "attempts at the wrong one")
    wait_for(lambda: refused(md1).get("wrong_peer", 0) > 1, "their refusal")
    assert links["md1"].attempts == {"up": 1}


class TestMode:
    """``tls.mode``: what starts in clear, and what does not."""

    def config(self, fleet: Fleet, host: str, mode: str, advertise: str | None = None) -> PddConfig:
        config = fleet.configure(host=host, advertise={"md0": advertise} if advertise else None)
        return other_tls(config, None, mode=mode)

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
    def test_loopback_is_plain_by_default(self, fleet: Fleet, host: str) -> None:
        assert isinstance(choose_transport(self.config(fleet, host, "auto"), "md0"), TcpTransport)

    @pytest.mark.parametrize(
        ("host", "advertise"),
        [("0.0.0.0", None), ("10.1.2.3", None), ("md.example", None), ("127.0.0.1", "192.0.2.1:7000")],
    )
    def test_anything_else_needs_certificates_or_a_word(
        self, fleet: Fleet, host: str, advertise: str | None
    ) -> None:
        with pytest.raises(Exception, match=r"pdd certs.*mode = .off."):
            choose_transport(self.config(fleet, host, "auto", advertise), "md0")
        assert isinstance(choose_transport(self.config(fleet, host, "off", advertise), "md0"), TcpTransport)

    def test_the_agent_does_not_start_and_says_why(self, fleet: Fleet) -> None:
        fleet.config = self.config(fleet, "0.0.0.0", "auto")
        process = fleet.process("md0")
        assert process.process.wait(WAIT_S) == 1
        log = process.log_text()
        assert "needs TLS" in log
        assert "pdd certs" in log
        assert "Traceback" not in log
