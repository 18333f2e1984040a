"""Asks everything that a configuration names what it is; judges nothing."""

import asyncio
import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from pdd.agent.connection import probe
from pdd.config.load import KvEventAddresses, agent_socket, kv_event_addresses
from pdd.config.schema import EngineConfig, PddConfig
from pdd.core.errors import ConfigurationError, PddError
from pdd.transport.base import Transport
from pdd.transport.choice import choose_transport, tls_files
from pdd.transport.credentials import TlsFiles, load_contexts
from pdd.transport.issue import is_issued_by, names_of, read_certificate

TIMEOUT_S: Final = 3.0
IPC: Final = "ipc://"
SIGNATURE_BYTES: Final = 10


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
    events_problem: str | None = None
    events_unknown: str | None = None
    """Why its KV events cannot be asked for from here, if they cannot."""
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
    (health_problem, _), (state_problem, state), (answer, port_problem), events = await asyncio.gather(
        _get(session, f"{engine.url}/health", is_json=False),
        _get(session, f"{engine.control_url}/v1/state", is_json=True),
        asyncio.to_thread(_probe_port, engine, transport, transport_problem),
        probe_events(kv_event_addresses(engine, agent_socket=agent_socket(config, engine.id))),
    )
    needs_certificate = any(config.uses_tls(other) for other in config.engines)
    return EngineFacts(
        health_problem=health_problem,
        state=state,
        state_problem=state_problem,
        port_answer=answer,
        port_problem=port_problem,
        events_problem=events[0],
        events_unknown=events[1],
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


async def probe_events(addresses: KvEventAddresses) -> tuple[str | None, str | None]:
    """What is wrong with where an engine says what its caches hold, and why that cannot be found out, if so.

    Source:
        ZMTP 3.1, section 3.2 (the signature that both sides begin with).
    """
    if addresses.follow is None or addresses.follow_replay is None:
        return None, "without events_port only a router on its host hears what its caches hold"
    both = addresses.follow, addresses.follow_replay
    if (absent := next((path for path in map(_absent, both) if path is not None), None)) is not None:
        return None, f"{absent} is not on this host"
    problems = await asyncio.gather(*(_greeted(address) for address in both))
    return "; ".join(problem for problem in problems if problem is not None) or None, None


def _absent(address: str) -> Path | None:
    """The address's Unix socket if it is one that is not there."""
    path = Path(address.removeprefix(IPC))
    return path if address.startswith(IPC) and not path.exists() else None


async def _greeted(address: str) -> str | None:
    """Why what answers at the address is no publisher of KV events; None if it is one."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            if address.startswith(IPC):
                reader, writer = await asyncio.open_unix_connection(address.removeprefix(IPC))
            else:
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            greeting = await reader.readexactly(SIGNATURE_BYTES)
    except TimeoutError:
        return f"{address} does not answer in {TIMEOUT_S:g} s"
    except asyncio.IncompleteReadError:
        return f"{address} closes the connection"
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    finally:
        if writer is not None:
            writer.close()
    is_zeromq = (greeting[0], greeting[-1]) == (0xFF, 0x7F)
    return None if is_zeromq else f"{address} answers, but not as ZeroMQ: is engines[].events_port right?"


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
