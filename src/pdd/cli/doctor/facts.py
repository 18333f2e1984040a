"""Asks everything that a configuration names what it is; judges nothing."""

import asyncio
import datetime
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from pdd.agent.connection import probe
from pdd.config.schema import EngineConfig, PddConfig
from pdd.core.errors import ConfigurationError, PddError
from pdd.transport.base import Transport
from pdd.transport.choice import choose_transport, tls_files
from pdd.transport.credentials import TlsFiles, load_contexts
from pdd.transport.issue import is_issued_by, names_of, read_certificate

TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """What an engine's certificate says, as far as its files are on this host."""

    path: str
    problem: str | None = None
    not_after: datetime.datetime | None = None
    ca_not_after: datetime.datetime | None = None
    names: tuple[str, ...] = ()
    is_of_ca: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What was learned about one engine and its agent; each problem in words, None if there was none."""

    health_problem: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    state_problem: str | None = None
    port_answer: str | None = None
    port_problem: str | None = None
    certificate: CertificateFacts | None = None
    """None if its files are not on this host, or it needs none."""


async def gather_facts(config: PddConfig) -> dict[str, EngineFacts]:
    """What can be learned from here about each engine, within a few seconds."""
    transport, transport_problem = await asyncio.to_thread(_any_transport, config)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        found = await asyncio.gather(
            *(_ask(config, engine, session, transport, transport_problem) for engine in config.engines)
        )
    return {engine.id: facts for engine, facts in zip(config.engines, found, strict=True)}


async def _ask(
    config: PddConfig,
    engine: EngineConfig,
    session: aiohttp.ClientSession,
    transport: Transport | None,
    transport_problem: str,
) -> EngineFacts:
    (health_problem, _), (state_problem, state), (answer, port_problem) = await asyncio.gather(
        _get(session, f"{engine.url}/health", is_json=False),
        _get(session, f"{engine.control_url}/v1/state", is_json=True),
        asyncio.to_thread(_probe_port, engine, transport, transport_problem),
    )
    needs_certificate = any(config.uses_tls(other) for other in config.engines)
    return EngineFacts(
        health_problem=health_problem,
        state=state,
        state_problem=state_problem,
        port_answer=answer,
        port_problem=port_problem,
        certificate=read_certificate_facts(tls_files(config, engine.id)) if needs_certificate else None,
    )


async def _get(
    session: aiohttp.ClientSession, url: str, *, is_json: bool
) -> tuple[str | None, dict[str, Any]]:
    try:
        async with session.get(url) as answer:
            if answer.status != 200:
                return f"{url} answers {answer.status}", {}
            value = await answer.json() if is_json else {}
    except TimeoutError:
        return f"{url} does not answer in {TIMEOUT_S:g} s", {}
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return f"{url}: {error}", {}
    return (None, value) if isinstance(value, dict) else (f"{url} does not answer with an object", {})


def _any_transport(config: PddConfig) -> tuple[Transport | None, str]:
    """A transport with the certificate of any engine: a probe only asks for a name, and opens no session."""
    problem = ""
    for engine in config.engines:
        try:
            return choose_transport(config, engine.id), ""
        except ConfigurationError as error:
            problem = problem or str(error)
    return None, problem


def _probe_port(
    engine: EngineConfig, transport: Transport | None, problem: str
) -> tuple[str | None, str | None]:
    if transport is None:
        return None, problem
    try:
        stream = transport.dial(engine.data_address, timeout_s=TIMEOUT_S)
        try:
            return probe(stream, timeout_s=TIMEOUT_S), None
        finally:
            stream.close()
    except PddError as error:
        return None, str(error)


def read_certificate_facts(files: TlsFiles) -> CertificateFacts | None:
    """What the files say; None if neither certificate nor key is on this host."""
    if not files.cert.exists() and not files.key.exists():
        return None
    try:
        load_contexts(files)
        certificate, ca = read_certificate(files.cert), read_certificate(files.ca)
    except ConfigurationError as error:
        return CertificateFacts(path=str(files.cert), problem=str(error))
    return CertificateFacts(
        path=str(files.cert),
        not_after=certificate.not_valid_after_utc,
        ca_not_after=ca.not_valid_after_utc,
        names=names_of(certificate),
        is_of_ca=is_issued_by(certificate, ca),
    )
