"""What the doctor concludes from what it was told."""

import datetime
from typing import Any

import pytest
from tests.kit.agent_fleet import tls_config
from tests.kit.engine_side import fingerprint

from pdd.cli.doctor.facts import CertificateFacts, EngineFacts
from pdd.cli.doctor.findings import Finding, examine
from pdd.config.schema import EngineConfig, ForwardConfig, LinkConfig, ModelConfig, PddConfig

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
PRINT = fingerprint(chunk_bytes=4096, chunk_tokens=32)


def make_config(tls: bool = False, **changes: Any) -> PddConfig:
    engines = tuple(
        EngineConfig(
            id=engine_id,
            role=role,  # type: ignore[arg-type]
            **(
                {"port": base, "data_port": base + 1, "control_port": base + 2}
                | (changes if engine_id == "md0" else {})
            ),
        )
        for engine_id, role, base in (("p0", "prefill", 100), ("md0", "main", 200))
    )
    config = PddConfig(model=ModelConfig(path="m", name="m"), engines=engines)
    if tls:
        config = config.model_copy(update={"tls": tls_config(None).model_copy(update={"mode": "on"})})
    return config


def state(engine_id: str, **changes: Any) -> dict[str, Any]:
    peers = [{"peer": "md0", "state": "up", "reason": None}] if engine_id == "p0" else []
    return {
        "engine_id": engine_id,
        "engine_connected": True,
        "fingerprint": PRINT,
        "peers": peers,
        "refused_lately": [],
    } | changes


def facts(**engines: dict[str, Any]) -> dict[str, EngineFacts]:
    return {
        engine_id: EngineFacts(
            **({"state": state(engine_id), "port_answer": engine_id} | engines.get(engine_id, {}))
        )
        for engine_id in ("p0", "md0")
    }


def certificate(**changes: Any) -> CertificateFacts:
    day = datetime.timedelta(days=1)
    values = {
        "path": "md0.crt",
        "not_after": NOW + 90 * day,
        "ca_not_after": NOW + 900 * day,
        "names": ("md0",),
        "is_of_ca": True,
    }
    return CertificateFacts(**(values | changes))


def bad(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.check, f.subject, f.verdict) for f in findings if f.verdict != "ok"]


def test_a_good_deployment_has_no_complaint() -> None:
    assert bad(examine(make_config(), facts(), now=NOW)) == []


@pytest.mark.parametrize(
    ("told", "check", "words"),
    [
        ({"health_problem": "http://x answers 500"}, "engine", "500"),
        ({"state_problem": "refused", "state": {}}, "agent", "refused"),
        ({"state": state("md0", engine_connected=False)}, "agent", "not connected"),
        ({"state": state("md9")}, "agent", "md9"),
        ({"port_problem": "no answer from x"}, "data port", "no answer"),
        ({"port_answer": "rld0"}, "data port", "advertise"),
        ({"events_problem": "tcp://x:5557: Connection refused"}, "KV events", "refused"),
        ({"state": state("md0", fingerprint=PRINT | {"dtype": "bf16"})}, "chunks", "dtype: test != bf16"),
    ],
)
def test_what_is_wrong_with_an_engine_is_named(told: dict[str, Any], check: str, words: str) -> None:
    findings = examine(make_config(), facts(md0=told), now=NOW)
    failed = [f for f in findings if f.verdict == "fail"]
    assert check in [f.check for f in failed]
    assert any(words in f.detail for f in failed)
    assert all("md0" in f.subject for f in failed)


def test_a_link_that_is_down_is_named_with_its_reason() -> None:
    peers = [{"peer": "md0", "state": "down", "reason": "certificate has expired"}]
    findings = examine(make_config(), facts(p0={"state": state("p0", peers=peers)}), now=NOW)
    assert bad(findings) == [("link", "p0 -> md0", "fail")]
    assert "expired" in findings[-1].detail


def test_an_engine_that_has_not_said_what_chunks_are_is_skipped() -> None:
    findings = examine(make_config(), facts(md0={"state": state("md0", fingerprint=None)}), now=NOW)
    assert ("chunks", "p0 -> md0", "skip") in bad(findings)


def test_a_refusal_is_a_warning() -> None:
    lately = [{"reason": "identity", "address": "1.2.3.4:5", "peer": "p9", "detail": "claims p9"}]
    findings = examine(make_config(), facts(md0={"state": state("md0", refused_lately=lately)}), now=NOW)
    assert bad(findings) == [("refusals", "md0", "warn")]


def test_a_port_used_twice_is_named() -> None:
    findings = examine(make_config(port=102), facts(), now=NOW)
    assert ("ports", "127.0.0.1:102", "fail") in bad(findings)
    assert "p0.control_port and md0.port" in findings[0].detail


@pytest.mark.parametrize(
    ("port", "taken", "words"),
    [(102, 102, "p0.control_port and md0.events_port"), (99, 100, "p0.port and md0.events_port + 1")],
)
def test_the_ports_of_kv_events_are_ports_like_others(port: int, taken: int, words: str) -> None:
    findings = examine(make_config(events_port=port), facts(), now=NOW)
    assert bad(findings) == [("ports", f"127.0.0.1:{taken}", "fail")]
    assert findings[0].detail == f"used by {words}"


def test_engines_that_are_reached_elsewhere_have_ports_of_their_own() -> None:
    config = make_config(port=100, url="http://md.example:100")
    assert bad(examine(config, facts(), now=NOW)) == []


def test_the_ports_of_an_emulated_line_are_compared_too() -> None:
    forward = ForwardConfig(listen="127.0.0.1:101", target="127.0.0.1:1")
    link = LinkConfig(rate=1e6, delay=0.01, forwards=(forward,), control="127.0.0.1:8000")
    config = make_config().model_copy(update={"links": (link,)})
    findings = examine(config, facts(), now=NOW)
    assert {(f.subject, f.detail) for f in findings if f.check == "ports"} == {
        ("127.0.0.1:101", "used by p0.data_port and wan.listen"),
        ("127.0.0.1:8000", "used by router.port and wan.control"),
    }


def test_kv_events_that_cannot_be_asked_for_from_here_are_skipped_with_the_reason() -> None:
    findings = examine(make_config(), facts(md0={"events_unknown": "not on this host"}), now=NOW)
    assert bad(findings) == [("KV events", "md0", "skip")]


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, "ok", "valid to"),
        ({"not_after": NOW}, "fail", "expired"),
        ({"ca_not_after": NOW}, "fail", "the CA expired"),
        ({"not_after": NOW + datetime.timedelta(days=13)}, "warn", "expires on"),
        ({"names": ("p0",)}, "fail", "is for p0, not for md0"),
        ({"names": ()}, "fail", "is for nobody"),
        ({"is_of_ca": False}, "fail", "not of the CA"),
        ({"problem": "cannot use the key"}, "fail", "cannot use the key"),
    ],
)
def test_certificates(changes: dict[str, Any], verdict: str, words: str) -> None:
    told = facts(md0={"certificate": certificate(**changes)})
    findings = {
        f.subject: f for f in examine(make_config(tls=True), told, now=NOW) if f.check == "certificate"
    }
    assert findings["md0"].verdict == verdict
    assert words in findings["md0"].detail
    assert findings["p0"].verdict == "skip"
