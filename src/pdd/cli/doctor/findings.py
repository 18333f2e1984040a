"""Judges facts about a deployment: pure, so that each finding has a test without a network."""

import datetime
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from pdd.cli.doctor.facts import CertificateFacts, EngineFacts
from pdd.config.schema import EngineConfig, PddConfig
from pdd.core.fingerprint import differing_fields

Verdict = Literal["ok", "warn", "fail", "skip"]
_EXPIRES_SOON: Final = datetime.timedelta(days=14)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of one thing."""

    check: str
    subject: str
    verdict: Verdict
    detail: str = ""


def examine(config: PddConfig, facts: Mapping[str, EngineFacts], *, now: datetime.datetime) -> list[Finding]:
    """All findings, in the order in which a person would look."""
    return [
        *_ports(config),
        *(finding for engine in config.engines for finding in _engine(config, engine, facts[engine.id], now)),
        *(finding for pair in _pairs(config) for finding in _pair(*pair, facts)),
    ]


def _ports(config: PddConfig) -> Iterator[Finding]:
    uses: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    uses[config.router.host, config.router.port].append("router.port")
    for engine in config.engines:
        # Many machines bind 0.0.0.0 or loopback; those that are reached elsewhere are others.
        reached = urlsplit(engine.url).hostname
        machine = engine.host if reached == engine.host else f"{engine.host} ({reached})"
        for name, port in engine.ports.items():
            uses[machine, port].append(f"{engine.id}.{name}")
    for link in config.links:
        addresses = [(f"{link.name}.listen", forward.listen) for forward in link.forwards]
        for name, address in [
            *addresses,
            *([(f"{link.name}.control", link.control)] if link.control else []),
        ]:
            host, _, port_text = address.rpartition(":")
            uses[host.strip("[]"), int(port_text)].append(name)
    for (host, port), names in uses.items():
        if len(names) > 1:
            yield Finding(
                check="ports",
                subject=f"{host}:{port}",
                verdict="fail",
                detail=f"used by {' and '.join(names)}",
            )


def _engine(
    config: PddConfig, engine: EngineConfig, facts: EngineFacts, now: datetime.datetime
) -> Iterator[Finding]:
    yield _finding("engine", engine.id, facts.health_problem, good=engine.url)
    yield _finding("agent", engine.id, facts.state_problem or _agent_problem(engine, facts), good="connected")
    yield _finding("data port", engine.id, _port_problem(engine, facts), good=engine.data_address)
    if facts.events_unknown is None:
        yield _finding("KV events", engine.id, facts.events_problem, good="both sockets answer")
    else:
        yield Finding(check="KV events", subject=engine.id, verdict="skip", detail=facts.events_unknown)
    if any(config.uses_tls(other) for other in config.engines):
        yield _certificate(engine, facts.certificate, now)
    for refused in facts.state.get("refused_lately", [])[-1:]:
        who = refused.get("peer") or refused.get("address")
        yield Finding(
            check="refusals",
            subject=engine.id,
            verdict="warn",
            detail=f"refused {who}: {refused.get('reason')} {refused.get('detail')}",
        )


def _agent_problem(engine: EngineConfig, facts: EngineFacts) -> str | None:
    found = facts.state.get("engine_id")
    if found != engine.id:
        return f"at {engine.control_url} answers the agent of {found}"
    return None if facts.state.get("engine_connected") else "its engine is not connected"


def _port_problem(engine: EngineConfig, facts: EngineFacts) -> str | None:
    if facts.port_problem is not None:
        return facts.port_problem
    if facts.port_answer not in ("", engine.id):
        return f"at {engine.data_address} answers {facts.port_answer}: is engines[].advertise right?"
    return None


def _certificate(engine: EngineConfig, facts: CertificateFacts | None, now: datetime.datetime) -> Finding:
    def result(verdict: Verdict, detail: str) -> Finding:
        return Finding(check="certificate", subject=engine.id, verdict=verdict, detail=detail)

    if facts is None:
        return result("skip", "its files are not on this host")
    if facts.problem is not None:
        return result("fail", facts.problem)
    assert facts.not_after is not None
    assert facts.ca_not_after is not None
    if not facts.is_of_ca:
        return result("fail", f"{facts.path} is not of the CA that tls.ca names")
    if engine.id not in facts.names:
        return result(
            "fail", f"{facts.path} is for {', '.join(facts.names) or 'nobody'}, not for {engine.id}"
        )
    ends, what = min((facts.not_after, facts.path), (facts.ca_not_after, "the CA"))
    when = ends.strftime("%Y-%m-%d %H:%M UTC")
    if ends <= now:
        return result("fail", f"{what} expired on {when}; run `pdd certs` again")
    if ends - now < _EXPIRES_SOON:
        return result("warn", f"{what} expires on {when}; run `pdd certs` again")
    return result("ok", f"valid to {when}")


def _pairs(config: PddConfig) -> Iterator[tuple[EngineConfig, EngineConfig]]:
    for prefill in config.engines_of("prefill"):
        for other in config.engines:
            if other.role != "prefill":
                yield prefill, other


def _pair(prefill: EngineConfig, other: EngineConfig, facts: Mapping[str, EngineFacts]) -> Iterator[Finding]:
    subject = f"{prefill.id} -> {other.id}"
    ours, theirs = (facts[engine.id].state.get("fingerprint") for engine in (prefill, other))
    if not ours or not theirs:
        yield Finding(
            check="chunks", subject=subject, verdict="skip", detail="one has not said what they are"
        )
    else:
        differing = differing_fields(ours, theirs)
        yield _finding("chunks", subject, "; ".join(differing) or None, good="mean the same")
    link = next((p for p in facts[prefill.id].state.get("peers", []) if p.get("peer") == other.id), None)
    if link is None:
        yield Finding(check="link", subject=subject, verdict="skip", detail="not known yet")
    else:
        bad = link.get("state") in ("down", "incompatible")
        problem = f"{link['state']}: {link.get('reason')}" if bad else None
        yield _finding("link", subject, problem, good=str(link.get("state")))


def _finding(check: str, subject: str, problem: str | None, *, good: str) -> Finding:
    verdict: Verdict = "ok" if problem is None else "fail"
    return Finding(check=check, subject=subject, verdict=verdict, detail=problem or good)
