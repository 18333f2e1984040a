"""Which transport carries KV to which engine, as the configuration says."""

from pathlib import Path

from pdd.config.schema import EngineConfig, PddConfig
from pdd.core.errors import ConfigurationError
from pdd.transport.base import Listener, Stream, Transport
from pdd.transport.credentials import TlsFiles
from pdd.transport.tcp import TcpTransport
from pdd.transport.tls import TlsTransport


class ChosenTransport(Transport):
    """Dials each address, and listens, with TLS or without as it was told.

    Args:
        plain: For addresses in clear.
        tls: For ``tls_addresses``; None if there are none.
        tls_addresses: Peers that speak TLS.
        listens_with_tls: Whether this side's own port does.
    """

    def __init__(
        self,
        *,
        plain: Transport,
        tls: Transport | None,
        tls_addresses: frozenset[str],
        listens_with_tls: bool,
    ) -> None:
        self._plain = plain
        self._tls = tls
        self._tls_addresses = tls_addresses
        self._listens_with_tls = listens_with_tls

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """See ``Transport.dial``."""
        return self._of(is_tls=address in self._tls_addresses).dial(address, timeout_s=timeout_s)

    def listen(self, address: str) -> Listener:
        """See ``Transport.listen``."""
        return self._of(is_tls=self._listens_with_tls).listen(address)

    def _of(self, *, is_tls: bool) -> Transport:
        if not is_tls:
            return self._plain
        assert self._tls is not None
        return self._tls


def choose_transport(config: PddConfig, engine_id: str) -> Transport:
    """The transport of one engine's agent.

    Raises:
        ConfigurationError: If TLS is needed and its files cannot be used; says what to do about it.
    """
    engine = config.engine(engine_id)
    encrypted = [peer for peer in config.engines if config.uses_tls(peer)]
    plain = TcpTransport()
    if not encrypted:
        return plain
    try:
        tls = TlsTransport(tls_files(config, engine_id))
    except ConfigurationError as error:
        raise ConfigurationError(_explain(config, encrypted[0], error)) from error
    return ChosenTransport(
        plain=plain,
        tls=tls,
        tls_addresses=frozenset(peer.data_address for peer in encrypted),
        listens_with_tls=config.uses_tls(engine),
    )


def tls_files(config: PddConfig, engine_id: str) -> TlsFiles:
    """The TLS files of one engine."""
    cert, key, ca = (
        Path(text.replace("{engine}", engine_id)) for text in (config.tls.cert, config.tls.key, config.tls.ca)
    )
    return TlsFiles(cert=cert, key=key, ca=ca)


def _explain(config: PddConfig, engine: EngineConfig, error: ConfigurationError) -> str:
    if config.tls.mode == "on":
        return f'tls.mode is "on", but {error}'
    return (
        f"KV to engine {engine.id} goes to {engine.data_address} (port bound on {engine.host}), which is not "
        f"loopback, so it needs TLS, but {error}. Run `pdd certs --out certs` for all engines, or write "
        f'mode = "off" under [tls] if the network is trusted or encrypts by itself'
    )
