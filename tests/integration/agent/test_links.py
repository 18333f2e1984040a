"""Links between agents: addresses, names, rates, the order on them, and lines that fail without a word."""

import itertools
import json
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.integration.agent.conftest import Fleet
from tests.integration.transport.test_tcp import has_ipv6
from tests.kit.agent_fleet import WAIT_S, free_port, wait_for
from tests.kit.certificates import Pki
from tests.kit.engine_side import FakeEngine

from pdd.agent.advertise import check_advertised
from pdd.config.schema import EngineConfig
from pdd.core.errors import ConfigurationError
from pdd.transport.base import Stream
from pdd.transport.tcp import TcpTransport
from pdd.transport.tls import TlsTransport

CHUNK = 64 * 2**10


def link_of(agent: Any, peer: str = "md0") -> dict[str, Any]:
    return next(link for link in agent.agent.state()["peers"] if link["peer"] == peer)


class TestAddresses:
    @pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
    @pytest.mark.parametrize("is_tls", [False, True])
    def test_all_on_ipv6(self, fleet: Fleet, is_tls: bool) -> None:
        certs = fleet.run_dir / "certs"
        if is_tls:
            pki = Pki(certs)
            pki.files("p0")
            pki.files("md0")
        p, md = fleet.agents(host="::1", certs=certs if is_tls else None)
        main, prefill = md.engine(), p.engine()
        prefill.push("t", ["md0"], range(5))
        p.wait_event("landed", transfer="t")
        main.check_load(range(5))
        assert link_of(p)["address"].startswith("[::1]:")

    @pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")
    def test_a_process_on_ipv6(self, fleet: Fleet) -> None:
        fleet.configure("p0", host="::1")
        process = fleet.process("p0")

        def state() -> dict[str, Any] | None:
            try:
                with urllib.request.urlopen(f"{process.control_url}/v1/state", timeout=10) as answer:
                    return json.loads(answer.read())
            except OSError:
                assert process.process.poll() is None
                return None

        assert wait_for(state, "the agent")["engine_id"] == "p0"
        assert process.control_url.startswith("http://[::1]:")

    def test_a_name_is_resolved_anew_at_each_attempt(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet.configure()
        port = fleet.config.engine("md0").data_port
        engines = tuple(
            e.model_copy(update={"advertise": f"md.example:{port}"}) if e.id == "md0" else e
            for e in fleet.config.engines
        )
        fleet.config = fleet.config.model_copy(
            update={"engines": engines, "tls": fleet.config.tls.model_copy(update={"mode": "off"})}
        )
        resolve = socket.getaddrinfo
        where = {"md.example": "127.0.0.2"}

        def fake(host: Any, *args: Any, **options: Any) -> Any:
            return resolve(where.get(host, host), *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", fake)
        md, p = fleet.agent("md0"), fleet.agent("p0")
        main, prefill = md.engine(), p.engine()
        wait_for(lambda: link_of(p)["state"] == "down", "the old address to fail")
        where["md.example"] = "127.0.0.1"
        prefill.push("t", ["md0"], range(5))
        p.wait_event("landed", transfer="t")
        main.check_load(range(5))


class TestAdvertise:
    """Case 94: a wrong advertised address fails at the start, and is named."""

    def engine(self, host: str, advertise: str | None, port: int) -> EngineConfig:
        return EngineConfig(
            id="md0",
            role="main",
            host=host,
            port=free_port(),
            data_port=port,
            control_port=free_port(),
            advertise=advertise,
        )

    def test_the_right_one_is_silent(self, fleet: Fleet) -> None:
        (md,) = fleet.agents("md0")
        assert check_advertised(md.config.engine("md0"), TcpTransport()) is None
        assert md.agent.state()["refused"] == {}

    @pytest.mark.parametrize("host", ["0.0.0.0", "::"])
    def test_a_wildcard_is_no_address(self, host: str) -> None:
        with pytest.raises(ConfigurationError, match="no peer can dial"):
            check_advertised(self.engine(host, None, 1), TcpTransport())

    def test_another_address_of_this_host_is_named(self, fleet: Fleet) -> None:
        (md,) = fleet.agents("md0")
        port = md.config.engine("md0").data_port
        with pytest.raises(ConfigurationError, match=f"127.0.0.3:{port}.*listens on 127.0.0.1"):
            check_advertised(self.engine("127.0.0.1", f"127.0.0.3:{port}", port), TcpTransport())

    def test_another_agents_address_is_named(self, fleet: Fleet) -> None:
        p, _md = fleet.agents("p0", "md0")
        where = p.config.engine("p0").data_address
        with pytest.raises(ConfigurationError, match=f"{where}, where p0 answers"):
            check_advertised(self.engine("127.0.0.1", where, 1), TcpTransport())

    @pytest.mark.parametrize("advertise", ["127.0.0.1:1", "no-such-name.invalid:7"])
    def test_what_may_only_be_too_early_does_not_stop_the_start(self, advertise: str) -> None:
        assert check_advertised(self.engine("127.0.0.1", advertise, 99), TcpTransport())

    @pytest.mark.parametrize("is_tls", [False, True])
    def test_an_answer_that_is_late_does_not_stop_the_start(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, is_tls: bool
    ) -> None:
        monkeypatch.setattr("pdd.agent.advertise._TIMEOUT_S", 0.2)
        transport = TlsTransport(Pki(fleet.run_dir).files("md0")) if is_tls else TcpTransport()
        with socket.create_server(("127.0.0.3", free_port())) as silent:
            port = silent.getsockname()[1]
            assert check_advertised(self.engine("127.0.0.1", f"127.0.0.3:{port}", port), transport)

    def test_the_process_ends_with_the_address(self, fleet: Fleet) -> None:
        fleet.configure("md0")
        port = fleet.config.engine("md0").data_port
        engines = tuple(e.model_copy(update={"advertise": f"127.0.0.3:{port}"}) for e in fleet.config.engines)
        fleet.config = fleet.config.model_copy(update={"engines": engines})
        process = fleet.process("md0")
        assert process.process.wait(WAIT_S) == 1
        assert f"advertises 127.0.0.3:{port}" in process.log_text()
        assert "Traceback" not in process.log_text()


class TestBreaker:
    def test_attempts_are_a_second_apart_however_many_transfers_come(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet.configure()
        attempted_s: list[float] = []
        meddler = fleet.meddle("md0")
        meddler.refuse = lambda _index: True
        p = fleet.agent("p0")
        prefill = p.engine()
        assert p.agent.space is not None
        link = p.agent.space.links["md0"]
        dial = link.dial

        def noted() -> Stream:
            attempted_s.append(link._backoff._attempted_s)
            return dial()

        monkeypatch.setattr(link, "dial", noted)
        end_s = time.monotonic() + WAIT_S
        for i in itertools.count():
            if link_of(p)["breaker"] == "open" and len(attempted_s) >= 4:
                break
            assert time.monotonic() < end_s
            prefill.push(f"t{i}", ["md0"], [i])
        gaps = [b - a for a, b in itertools.pairwise(attempted_s)]
        assert min(gaps) >= 1.0
        meddler.refuse = lambda _index: False
        md = fleet.agent("md0")
        md.engine()
        prefill.push("heals", ["md0"], ["h"])
        wait_for(lambda: link_of(p)["state"] == "up", "the line to heal")
        assert link_of(p)["breaker"] == "closed"


class TestSilentLine:
    """Lines that lose what is sent without a word; new connections work."""

    @pytest.fixture
    def warm(self, fleet: Fleet) -> tuple[Any, Any, Any, Any]:
        fleet.configure(store_bytes=64 * 2**20, stall_timeout_s=6)
        meddler = fleet.meddle("md0")
        p, md = fleet.agent("p0"), fleet.agent("md0")
        main, prefill = md.engine(chunk_bytes=CHUNK), p.engine(chunk_bytes=CHUNK)
        prefill.push("warm", ["md0"], ["w"])
        p.wait_event("landed", transfer="warm")
        return p, prefill, main, meddler

    def test_an_idle_flow_that_a_middlebox_forgot_is_replaced_in_time(self, warm: Any) -> None:
        p, prefill, main, meddler = warm
        meddler.forget_connections()
        prefill.push("t", ["md0"], range(50))
        p.wait_event("stalled", transfer="t")
        p.wait_event("landed", transfer="t")
        main.check_load(range(50))

    def test_a_peer_that_falls_silent_in_the_middle_is_replaced_in_time(self, warm: Any) -> None:
        p, prefill, main, meddler = warm
        before = meddler.num_forward_bytes

        def forget(_index: int, _at: int, data: bytes) -> bytes:
            if meddler.num_forward_bytes - before > 2 * 2**20:
                meddler.tamper = None
                meddler.forget_connections()
            return data

        meddler.tamper = forget
        prefill.push("t", ["md0"], range(200))
        p.wait_event("landed", transfer="t")
        main.check_load(range(200))
        assert p.events("stalled")


def test_a_rate_cap_is_kept(fleet: Fleet) -> None:
    p, md = fleet.agents(max_rate=4 * 2**20, store_bytes=64 * 2**20, piece_bytes=2**16)
    main, prefill = md.engine(chunk_bytes=CHUNK), p.engine(chunk_bytes=CHUNK)
    wait_for(lambda: link_of(p)["state"] == "up", "the link")
    start_s = time.monotonic()
    prefill.push("t", ["md0"], range(160))  # 10 MiB
    p.wait_event("landed", transfer="t")
    assert time.monotonic() - start_s > 1.5  # what the kernel sends before it begins to pace is little
    main.check_load(range(160))


class TestOrder:
    def slow(self, fleet: Fleet, **options: Any) -> tuple[Any, ...]:
        sites = {"p0": "a", "rld0": "a", "md0": "b"}
        agents = fleet.agents("p0", "rld0", "md0", sites=sites, store_bytes=64 * 2**20, **options)
        engines = [agent.engine(chunk_bytes=CHUNK) for agent in reversed(agents)]
        wait_for(lambda: link_of(agents[0])["state"] == "up", "the link")
        return (*agents, *reversed(engines))

    def test_an_unmasked_transfer_overtakes(self, fleet: Fleet) -> None:
        p, _rld, _md, prefill, _relay, _main = self.slow(
            fleet, max_rate=4 * 2**20, streams=1, piece_bytes=2**16
        )
        prefill.push("masked", ["md0"], [f"m{i}" for i in range(100)], priority=-1, hold=True)
        prefill.push("unmasked", ["md0"], [f"u{i}" for i in range(20)], unmasked=True, hold=True)
        outbound = p.agent.space.outbound
        wait_for(lambda: outbound.num_transfers() == 2, "both")
        with outbound.lock:  # one right behind the other, however long this thread stood still between them
            assert outbound.resume("masked") == outbound.resume("unmasked") == ["md0"]
        unmasked = p.wait_event("landed", transfer="unmasked")
        assert unmasked["seq"] < p.wait_event("landed", transfer="masked")["seq"]

    def test_a_held_transfer_reserves_nothing_until_it_is_resumed(self, fleet: Fleet) -> None:
        p, _rld, md, prefill, relay, main = self.slow(fleet)
        prefill.push("t", ["rld0", "md0"], range(20), hold=True)
        p.wait_event("landed", transfer="t", peer="rld0")
        relay.check_load(range(20))
        assert md.agent.state()["store"]["used"] == 0
        assert p.agent.space.outbound.describe("t")["md0"]["state"] == "held"
        assert p.agent.space.outbound.resume("t") == ["md0"]
        p.wait_event("landed", transfer="t", peer="md0")
        main.check_load(range(20))
        assert p.agent.space.outbound.resume("t") == []

    def test_a_held_transfer_can_be_cancelled(self, fleet: Fleet) -> None:
        p, _rld, md, prefill, _relay, _main = self.slow(fleet)
        prefill.push("t", ["md0"], range(20), hold=True)
        wait_for(lambda: p.agent.state()["store"]["leased"] == 20, "the chunks")
        assert p.agent.space.outbound.cancel("t", None) == ["md0"]
        assert p.wait_event("failed", transfer="t")["reason"] == "cancelled"
        wait_for(lambda: p.agent.state()["store"]["leased"] == 0, "the sender's leases to end")
        assert p.agent.space.outbound.resume("t") == []
        assert md.agent.state()["store"]["used"] == 0

    def test_a_resume_that_comes_first_is_remembered(self, fleet: Fleet) -> None:
        p, _rld, _md, prefill, _relay, main = self.slow(fleet)
        assert p.agent.space.outbound.resume("t") == []
        prefill.push("t", ["md0"], range(20), hold=True)
        p.wait_event("landed", transfer="t")
        main.check_load(range(20))

    def test_a_hold_that_nobody_ends_ends_with_the_lease(self, fleet: Fleet) -> None:
        p, _rld, _md, prefill, _relay, main = self.slow(fleet, lease_s=0.5)
        prefill.push("t", ["md0"], range(20), hold=True)
        p.wait_event("landed", transfer="t")
        main.check_load(range(20))


class TestStopped:
    """SIGSTOP of either agent for longer than a lease and longer than the stall bound."""

    @pytest.mark.parametrize("who", ["p0", "md0"])
    def test_a_stopped_agent_is_noticed_and_welcome_back(self, fleet: Fleet, who: str) -> None:
        fleet.configure(store_bytes=64 * 2**20, lease_s=1, stall_timeout_s=1)
        meddler = fleet.meddle("md0")
        processes = {engine_id: fleet.process(engine_id) for engine_id in ("md0", "p0")}
        main, prefill = (processes[e].engine(chunk_bytes=CHUNK) for e in ("md0", "p0"))
        hold: Callable[[int, int, bytes], bytes] = lambda _i, _at, data: (  # noqa: E731
            meddler.hold() or data if len(main.mirror) > 20 else data
        )
        meddler.tamper = hold
        p_url = processes["p0"].control_url
        wait_for(lambda: state_at(p_url)["peers"][0]["state"] == "up", "the link")
        pushed_until(prefill, range(200), lambda: len(main.mirror) > 20)
        processes[who].process.send_signal(signal.SIGSTOP)
        meddler.tamper = None
        meddler.let_go()
        if who == "p0":
            md_url = processes["md0"].control_url
            # The receiver frees what it kept for a sender that is still stopped.
            wait_for(lambda: state_at(md_url)["store"]["leased"] == 0, "the lease to end")
        else:
            time.sleep(2.5)  # longer than a lease and the stall bound: what has to be waited out
        processes[who].process.send_signal(signal.SIGCONT)
        names = [f"after-{i}" for i in range(30)]
        pushed_until(prefill, names, lambda: main.has(names))
        main.check_load(names)
        assert all(_is_whole(main, name) for name in range(200) if main.has([name]))
        for engine in (main, prefill):
            engine.close()


def pushed_until(prefill: FakeEngine, names: Sequence[int | str], is_there: Callable[[], bool]) -> None:
    """It is there, after as many transfers as it took: with a short stall timeout some fail."""

    def has_come() -> bool:
        prefill.push(f"t-{time.monotonic()}", ["md0"], names)
        end_s = time.monotonic() + 3
        while time.monotonic() < end_s:
            if is_there():
                return True
            time.sleep(0.01)
        return False

    wait_for(has_come, "the transfer")


def state_at(control_url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{control_url}/v1/state", timeout=60) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def _is_whole(engine: Any, name: int) -> bool:
    engine.check_load([name])
    return True
