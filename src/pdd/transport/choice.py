"""Which transport carries KV to which engine, as the configuration says."""

from collections.abc import Mapping
from pathlib import Path

from pdd.config.schema import EngineConfig, PddConfig
from pdd.core.errors import ConfigurationError
from pdd.transport.base import Listener, Stream, Transport
from pdd.transport.credentials import TlsFiles
from pdd.transport.nixl import NixlTransport
from pdd.transport.tcp import TcpTransport
from pdd.transport.tls import TlsTransport


class ChosenTransport(Transport):
    """Dials each address, and listens, as it was told.

    Args:
        by_address: What carries KV to these peers.
        default: What dials any other address.
        listening: What this side's own port speaks.
    """

    def __init__(
        self, *, by_address: Mapping[str, Transport], default: Transport, listening: Transport
    ) -> None:
        self._by_address = by_address
        self._default = default
        self._listening = listening

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """See ``Transport.dial``."""
        return self._by_address.get(address, self._default).dial(address, timeout_s=timeout_s)

    def listen(self, address: str) -> Listener:
        """See ``Transport.listen``."""
        return self._listening.listen(address)


def choose_transport(config: PddConfig, engine_id: str) -> Transport:
    """The transport of one engine's agent.

    Raises:
        ConfigurationError: If TLS is needed and its files cannot be used, or NIXL is and is not installed;
            says what to do about it.
    """
    engine = config.engine(engine_id)
    plain = TcpTransport()
    encrypted = [peer for peer in config.engines if config.uses_tls(peer)]
    tls = _tls(config, engine_id, encrypted[0]) if encrypted else None
    by_nixl = [peer for peer in config.engines if config.uses_nixl(peer) and _meet(engine, peer)]
    if tls is None and not by_nixl:
        return plain
    # One endpoint a process, whatever its channels are: all engines of a site are dialled alike.
    fast = _nixl(tls if tls is not None and config.uses_tls(by_nixl[0]) else plain) if by_nixl else None

    def of(peer: EngineConfig) -> Transport:
        if fast is not None and peer in by_nixl:
            return fast
        return tls if tls is not None and config.uses_tls(peer) else plain

    return ChosenTransport(
        by_address={peer.data_address: of(peer) for peer in config.engines},
        default=plain,
        listening=of(engine),
    )


def tls_files(config: PddConfig, engine_id: str) -> TlsFiles:
    """The TLS files of one engine."""
    cert, key, ca = (
        Path(text.replace("{engine}", engine_id)) for text in (config.tls.cert, config.tls.key, config.tls.ca)
    )
    return TlsFiles(cert=cert, key=key, ca=ca)


def _meet(engine: EngineConfig, peer: EngineConfig) -> bool:
    """Whether the engine's agent is the peer's, or may push to it."""
    return engine.id == peer.id or (engine.role == "prefill" and engine.site == peer.site)


def _tls(config: PddConfig, engine_id: str, peer: EngineConfig) -> TlsTransport:
    try:
        return TlsTransport(tls_files(config, engine_id))
    except ConfigurationError as error:
        raise ConfigurationError(_explain(config, peer, error)) from error


def _nixl(channels: Transport) -> NixlTransport:
    try:
        return NixlTransport(channels)
    except ConfigurationError as error:
        raise ConfigurationError(f'agent.fast_transport is "nixl", but {error}') from error


def _explain(config: PddConfig, engine: EngineConfig, error: ConfigurationError) -> str:
    if config.tls.mode == "on":
        return f'tls.mode is "on", but {error}'
    return (
        f"KV to engine {engine.id} goes to {engine.data_address} (port bound on {engine.host}), which is not "
        f"loopback, so it needs TLS, but {error}. Run `pdd certs --out certs` for all engines, or write "
        f'mode = "off" under [tls] if the network is trusted or encrypts by itself'
    )
