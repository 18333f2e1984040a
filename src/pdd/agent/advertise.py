"""Whether the address that peers dial leads to this agent, tried at the start.

What cannot be right ends the start with the address named. What may only be too early or out of sight
from here (a relay that is not up yet, NAT that does not turn inwards, a name not published yet), or too slow
just now, is logged.
"""

import ipaddress
import logging
import socket
from typing import Final

from pdd.agent.connection import check_name, probe
from pdd.config.schema import EngineConfig
from pdd.core.errors import ConfigurationError, DeadlineError, PddError, UntrustedPeerError
from pdd.transport.base import Transport
from pdd.transport.tcp import split_address

_log = logging.getLogger(__name__)
_TIMEOUT_S: Final = 3.0


def check_advertised(engine: EngineConfig, transport: Transport) -> str | None:
    """Nothing, if peers that dial the address reach this agent; in words why not, if that may still change.

    Args:
        engine: The engine whose agent already listens.
        transport: The agent's own.

    Raises:
        ConfigurationError: If the address cannot be right.
    """
    address = engine.data_address
    host, port = split_address(address)
    if _is_wildcard(host):
        raise ConfigurationError(
            f"engine {engine.id} advertises {address}, which no peer can dial: set advertise to the address "
            "that leads here from the other engines"
        )
    try:
        found = _ask(address, engine.id, transport)
    except UntrustedPeerError as error:
        raise ConfigurationError(f"engine {engine.id} advertises {address}: {error}") from error
    except PddError as error:
        if port == engine.data_port and not _is_late(error) and _is_here(host):
            raise ConfigurationError(
                f"engine {engine.id} advertises {address}, an address of this host where its agent does not "
                f"listen (it listens on {engine.host}): {error}"
            ) from error
        _log.warning("own advertised address %s cannot be reached from here: %s", address, error)
        return str(error)
    if found not in ("", engine.id):
        raise ConfigurationError(f"engine {engine.id} advertises {address}, where {found} answers")
    return None


def _ask(address: str, engine_id: str, transport: Transport) -> str:
    stream = transport.dial(address, timeout_s=_TIMEOUT_S)
    try:
        check_name(stream, engine_id)
        return probe(stream, timeout_s=_TIMEOUT_S)
    finally:
        stream.close()


def _is_late(error: PddError) -> bool:
    """Whether no answer came in time: no proof that nobody listens, the machine may have stood still."""
    return isinstance(error, DeadlineError) or isinstance(error.__cause__, DeadlineError | TimeoutError)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    """Whether all addresses of the host are this machine's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(_can_bind(family, where) for family, _, _, _, where in found)


def _can_bind(family: socket.AddressFamily, where: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind(where)
    except OSError:
        return False
    return True
