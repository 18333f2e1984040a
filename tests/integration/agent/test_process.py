"""The agent as a process: its HTTP API, its signals, and what it leaves behind."""

import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import psutil
import pytest
from tests.integration.agent.conftest import Fleet
from tests.kit.agent_fleet import WAIT_S, AgentProcess, EventReader, wait_for


def call(agent: AgentProcess, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of a GET, or of a POST if there is a body."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(agent.control_url + path, data=data)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if text[:1] in "{[" else text
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def start(fleet: Fleet, engine_id: str) -> AgentProcess:
    agent = fleet.process(engine_id)

    def is_healthy() -> bool:
        try:
            return call(agent, "/health") == (200, {"status": "ok"})
        except OSError:
            assert agent.process.poll() is None, "the agent ended"
            return False

    wait_for(is_healthy, f"agent {engine_id}")
    return agent


def test_the_control_api_from_order_to_release(fleet: Fleet) -> None:
    fleet.configure()
    p, md = start(fleet, "p0"), start(fleet, "md0")
    state = call(p, "/v1/state")[1]
    assert state == {
        "engine_id": "p0",
        "engine_connected": False,
        "sampler": None,
        "fingerprint": None,
        "chunk_tokens": None,
        "chunk_bytes": None,
        "store": {"slots": 0, "used": 0, "leased": 0},
        "transfers": 0,
        "peers": [],
        "refused": {},
        "refused_lately": [],
    }
    main, prefill = md.engine(sampler="v2"), p.engine()
    assert [call(agent, "/v1/state")[1]["sampler"] for agent in (md, p)] == ["v2", ""]
    events = EventReader(p.control_url)
    assert events.wait("hello")["agent"] == "p0"
    events.wait("engine", connected=True)
    prefill.push("t", ["md0"], range(8))
    landed = events.wait("landed")
    assert (landed["transfer"], landed["peer"], landed["chunks"]) == ("t", "md0", 8)
    assert call(p, "/v1/transfers/t")[1]["role"] == "sender"
    assert call(md, "/v1/transfers/t")[1]["role"] == "receiver"
    assert call(p, "/v1/transfers/none")[0] == 404
    assert call(md, "/v1/state")[1]["store"]["leased"] == 8
    assert call(md, "/v1/transfers/t/release", {}) == (200, {"released": True})
    assert call(md, "/v1/transfers/t/release", b"") == (200, {"released": False})
    assert call(md, "/v1/state")[1]["store"]["leased"] == 0
    assert call(p, "/v1/transfers/t/cancel", {}) == (200, {"cancelled": []})
    link = call(p, "/v1/state")[1]["peers"][0]
    assert link["peer"] == "md0"
    assert link["state"] == "up"
    for engine in (prefill, main):
        engine.close()
    events.wait("engine", connected=False)
    events.close()


def test_a_cancel_over_http(fleet: Fleet) -> None:
    fleet.configure()
    p, md = start(fleet, "p0"), start(fleet, "md0")
    main, prefill = md.engine(), p.engine()
    events = EventReader(p.control_url)
    prefill.begin("r", "t", ["md0"], 100 * 32)
    prefill.store("r", range(10))
    main.wait(lambda: main.has(range(10)))
    assert call(p, "/v1/transfers/t/cancel", {"peers": ["md0"]}) == (200, {"cancelled": ["md0"]})
    assert events.wait("failed")["reason"] == "cancelled"
    wait_for(lambda: call(md, "/v1/state")[1]["store"]["leased"] == 0, "the receiver's leases to end")
    events.close()
    for engine in (prefill, main):
        engine.close()


def test_odd_transfer_names_over_http(fleet: Fleet) -> None:
    fleet.configure()
    p, md = start(fleet, "p0"), start(fleet, "md0")
    main, prefill = md.engine(), p.engine()
    events = EventReader(p.control_url)
    for number, name in enumerate(("a/b:c?d#e%20 f", "x" * 200, "..", "ü" * 50)):
        path = f"/v1/transfers/{urllib.parse.quote(name, safe='')}"
        prefill.push(name, ["md0"], [f"{number}-{i}" for i in range(3)])
        events.wait("landed", transfer=name)
        if name != "..":  # a path of dots means another path to every client
            assert call(p, path)[1]["role"] == "sender"
            assert call(md, f"{path}/release", {}) == (200, {"released": True})
    events.close()
    for engine in (prefill, main):
        engine.close()


def test_a_held_transfer_is_resumed_over_http(fleet: Fleet) -> None:
    fleet.configure(sites={"p0": "a", "md0": "b"})
    p, md = start(fleet, "p0"), start(fleet, "md0")
    main, prefill = md.engine(), p.engine()
    events = EventReader(p.control_url)
    prefill.push("t", ["md0"], range(8), hold=True)
    wait_for(lambda: call(p, "/v1/transfers/t")[1].get("peers", {}).get("md0"), "the transfer")
    assert call(p, "/v1/transfers/t")[1]["peers"]["md0"]["state"] == "held"
    assert call(p, "/v1/transfers/t/resume", {}) == (200, {"resumed": ["md0"]})
    events.wait("landed")
    assert call(p, "/v1/transfers/t/resume", {}) == (200, {"resumed": []})
    events.close()
    for engine in (prefill, main):
        engine.close()


@pytest.mark.parametrize("body", [b"{", b"[]", {"peers": "md0"}, {"peers": [1]}])
def test_a_malformed_cancel_is_refused(fleet: Fleet, body: Any) -> None:
    fleet.configure("p0")
    p = start(fleet, "p0")
    status, answer = call(p, "/v1/transfers/t/cancel", body)
    assert status == 400
    assert answer["error"]["message"]


def test_events_are_replayed_from_a_number_on(fleet: Fleet) -> None:
    fleet.configure("p0")
    p = start(fleet, "p0")
    for _ in range(2):
        p.engine().close()
    for after, first in ((1, 2), (10**6, 1)):
        with urllib.request.urlopen(f"{p.control_url}/v1/events?after={after}", timeout=30) as stream:
            assert json.loads(stream.readline())["event"] == "hello"
            assert json.loads(stream.readline())["seq"] == first
    assert call(p, "/v1/events?after=x")[0] == 400


def test_sigterm_ends_cleanly_with_an_engine_and_a_reader_connected(fleet: Fleet) -> None:
    fleet.configure("p0")
    p = start(fleet, "p0")
    engine = p.engine()
    events = EventReader(p.control_url)
    events.wait("hello")
    assert p.socket.exists()
    assert p.terminate() == 0
    assert not p.socket.exists()
    engine.wait(lambda: engine.is_closed)
    events.close()
    engine.close()


def test_kill_leaves_a_socket_file_that_the_next_start_replaces(fleet: Fleet) -> None:
    fleet.configure("p0")
    p = start(fleet, "p0")
    p.engine().close()
    p.kill()
    assert p.socket.exists()
    again = start(fleet, "p0")
    engine = again.engine()
    engine.store("r", range(3))
    engine.check_load(range(3))
    engine.close()


def test_a_port_in_use_is_named(fleet: Fleet, capfd: pytest.CaptureFixture[str]) -> None:
    fleet.configure("p0")
    for port in (fleet.config.engines[0].data_port, fleet.config.engines[0].control_port):
        with socket.create_server(("127.0.0.1", port)):
            agent = fleet.process("p0")
            assert agent.process.wait(WAIT_S) == 1
            log = agent.log_text()
            assert f"127.0.0.1:{port}" in log
            assert "Traceback" not in log


def test_an_idle_agent_costs_next_to_nothing(fleet: Fleet) -> None:
    fleet.configure()
    p, md = start(fleet, "p0"), start(fleet, "md0")
    main, prefill = md.engine(), p.engine()
    events = EventReader(p.control_url)
    prefill.push("t", ["md0"], range(8))
    events.wait("landed")
    for agent in (p, md):
        process = psutil.Process(agent.pid)
        before = process.cpu_times()
        switches, start_s = process.num_ctx_switches().voluntary, time.monotonic()
        time.sleep(2.0)  # a rate over time is what is asked for
        after, switched = process.cpu_times(), process.num_ctx_switches().voluntary
        elapsed_s = time.monotonic() - start_s
        assert (after.user + after.system - before.user - before.system) / elapsed_s < 0.03
        assert (switched - switches) / elapsed_s < 30
    events.close()
    for engine in (prefill, main):
        engine.close()


def test_metrics_are_those_of_the_reference_page_and_move(fleet: Fleet) -> None:
    fleet.configure()
    p, md = start(fleet, "p0"), start(fleet, "md0")
    main, prefill = md.engine(), p.engine()
    events = EventReader(p.control_url)
    prefill.push("t", ["md0"], range(8))
    events.wait("landed")
    landed = 'pdd_agent_transfers_total{outcome="landed"} 1.0'
    wait_for(lambda: landed in call(p, "/metrics")[1], "the count")  # the event comes first
    sent, received = call(p, "/metrics")[1], call(md, "/metrics")[1]
    assert 'pdd_agent_link_state{peer="md0",state="up"} 1.0' in sent
    assert "pdd_agent_landed_total 1.0" in received
    assert f"pdd_agent_received_payload_bytes_total {8 * 4096:.1f}" in received
    with open("docs/reference/agent.md", encoding="utf-8") as page:
        documented = {word for word in page.read().replace("`", " ").split() if word.startswith("pdd_agent_")}
    exported = {line.split()[2] for line in sent.splitlines() if line.startswith("# TYPE")}
    assert exported == documented
    events.close()
    for engine in (prefill, main):
        engine.close()
