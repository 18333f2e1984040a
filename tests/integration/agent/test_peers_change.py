"""Peers that come, go and move in the configuration while an agent runs."""

import contextlib
import signal
import socket
import threading
from pathlib import Path

import pytest
from tests.integration.agent.conftest import Fleet
from tests.kit.agent_fleet import EventReader, RunningAgent, wait_for

from pdd.config.schema import PddConfig
from pdd.transport.base import Transport
from pdd.transport.choice import choose_transport
from pdd.wire.frames import Refused, encode_control


def without(config: PddConfig, *ids: str) -> PddConfig:
    """The configuration as it is without some engines."""
    kept = tuple(engine for engine in config.engines if engine.id not in ids)
    return config.model_copy(update={"engines": kept})


def started(fleet: Fleet, config: PddConfig, engine_id: str) -> RunningAgent:
    agent = fleet.agent(engine_id, config=config)
    agent.engine()
    return agent


def test_a_new_peer_is_dialled_and_gets_kv(fleet: Fleet) -> None:
    whole = fleet.configure("p0", "md0", "md1")
    p = fleet.agent("p0", config=without(whole, "md1"))
    prefill = p.engine()
    started(fleet, whole, "md0")
    prefill.push("before", ["md0", "md1"], range(4))
    p.wait_event("landed", transfer="before", peer="md0")
    assert p.wait_event("failed", transfer="before", peer="md1")["reason"] == "unknown_peer"
    started(fleet, whole, "md1")
    p.agent.apply(whole)
    p.wait_event("link", peer="md1", state="up")  # before there is anything to send
    prefill.push("after", ["md0", "md1"], range(8))
    assert p.wait_event("landed", transfer="after", peer="md0")["chunks_sent"] == 4
    assert p.wait_event("landed", transfer="after", peer="md1")["chunks_sent"] == 8
    assert p.agent.space is not None
    assert p.agent.space.links["md0"].attempts["up"] == 1  # the link that stays was not touched


def test_what_is_on_its_way_to_a_peer_that_goes_has_failed_and_others_go_on(fleet: Fleet) -> None:
    whole = fleet.configure("p0", "md0", "md1", sites={"p0": "a", "md0": "b", "md1": "c"})
    p = fleet.agent("p0")
    prefill = p.engine()
    for engine_id in ("md0", "md1"):
        started(fleet, whole, engine_id)
    prefill.begin("r", "open", ["md0", "md1"], 64 * 32)
    prefill.store("r", range(10))
    p.wait_event("link", peer="md0", state="up")
    p.agent.apply(without(whole, "md0"))
    assert p.wait_event("failed", transfer="open", peer="md0")["reason"] == "peer_down"
    prefill.store("r", range(10, 64), first=10)
    p.wait_event("landed", transfer="open", peer="md1")
    assert [link["peer"] for link in p.agent.state()["peers"]] == ["md1"]


def test_a_peer_that_moves_is_dialled_at_its_new_address(fleet: Fleet) -> None:
    whole = fleet.configure("p0", "md0")
    p = fleet.agent("p0")
    prefill = p.engine()
    started(fleet, whole, "md0")
    prefill.push("one", ["md0"], range(4))
    p.wait_event("landed", transfer="one")
    meddler = fleet.meddle("md0")
    p.agent.apply(fleet.config)
    assert [link["address"] for link in p.agent.state()["peers"]] == [meddler.address]
    prefill.push("two", ["md0"], range(8))
    assert p.wait_event("landed", transfer="two")["chunks_sent"] == 4


def test_a_file_with_the_same_engines_makes_no_transport(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fleet.configure("p0", "md0", "md1")
    agent = fleet.agent("p0").agent
    chosen: list[PddConfig] = []

    def choose(config: PddConfig, engine_id: str) -> Transport:
        chosen.append(config)
        return choose_transport(config, engine_id)

    monkeypatch.setattr("pdd.agent.agent.choose_transport", choose)
    agent.apply(whole.model_copy(update={"engines": whole.engines[::-1]}))
    assert not chosen
    for config in (without(whole, "md1"), without(whole, "md1")):
        agent.apply(config)
    assert [{engine.id for engine in config.engines} for config in chosen] == [{"p0", "md0"}]


def test_an_engine_that_comes_later_meets_the_new_peers_too(fleet: Fleet) -> None:
    whole = fleet.configure("p0", "md0", "md1")
    p = fleet.agent("p0", config=without(whole, "md1"))
    p.agent.apply(whole)
    prefill = p.engine()
    started(fleet, whole, "md1")
    prefill.push("t", ["md1"], range(3))
    p.wait_event("landed", transfer="t", peer="md1")


def test_a_peer_of_another_version_is_refused_while_pairs_of_one_version_go_on(fleet: Fleet) -> None:
    whole = fleet.configure("p0", "md0", "md1")
    p = fleet.agent("p0")
    prefill = p.engine()
    started(fleet, whole, "md0")
    newer = whole.engine("md1")
    with socket.create_server(("127.0.0.1", newer.data_port)) as server:
        answer = Refused(reason="version", fields=["wire version: 1 != 999"], peer="md1")
        threading.Thread(target=answer_all, args=(server, encode_control(answer)), daemon=True).start()
        p.wait_event("link", peer="md1", state="incompatible")
        for number in range(3):
            prefill.push(f"t{number}", ["md0", "md1"], [f"{number}-{i}" for i in range(4)])
            p.wait_event("landed", transfer=f"t{number}", peer="md0")
            assert p.wait_event("failed", transfer=f"t{number}", peer="md1")["reason"] == "incompatible"
        server.shutdown(socket.SHUT_RDWR)  # also for the thread that waits in it
    # Its roll back, or ours forward: the same address, a version that fits.
    started(fleet, whole, "md1")
    p.wait_event("link", peer="md1", state="up")
    prefill.push("fits", ["md1"], range(4))
    p.wait_event("landed", transfer="fits", peer="md1")


def answer_all(server: socket.socket, answer: bytes) -> None:
    """Every connection is told the same, until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)


def toml(config: PddConfig) -> str:
    """The configuration as a file."""
    lines = [f'run_dir = "{config.run_dir}"', "[model]", 'path = "none"', 'name = "none"']
    lines += ["[agent]", "streams = 2"]
    for engine in config.engines:
        lines += ["[[engines]]"]
        lines += [f'{name} = "{getattr(engine, name)}"' for name in ("id", "role", "site", "host")]
        names = ("port", "data_port", "control_port", "store_bytes")
        lines += [f"{name} = {getattr(engine, name)}" for name in names]
    return "\n".join(lines)


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


@pytest.mark.parametrize("by_signal", [False, True])
def test_the_process_follows_its_file_and_sighup_without_a_restart(fleet: Fleet, by_signal: bool) -> None:
    whole = fleet.configure("p0", "md0", "md1")
    path = fleet.run_dir / "pdd.toml"
    replace(path, toml(without(whole, "md1")))
    p = fleet.process("p0", path=path)
    events = EventReader(p.control_url)
    events.wait("hello")
    prefill = p.engine()
    events.wait("link", peer="md0")
    started(fleet, whole, "md1")
    for wrong in ("[model", toml(without(whole, "p0", "md0", "md1"))):
        replace(path, wrong)
        p.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the new configuration is not used" in p.log_text(), "the wrong file being named")
    replace(path, toml(whole))
    if by_signal:
        p.process.send_signal(signal.SIGHUP)
    events.wait("link", peer="md1", state="up")
    prefill.push("t", ["md1"], range(3))
    events.wait("landed", transfer="t", peer="md1")
    assert p.process.poll() is None
    events.close()
    prefill.close()
