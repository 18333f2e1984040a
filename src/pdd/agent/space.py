"""All that depends on what a chunk is: the store, both transfer sides and the links.

Made when the first engine says what its chunks are; kept while engines with the same fingerprint and
geometry come and go; replaced, with everything in it, when another kind of engine comes.
"""

import logging
from dataclasses import dataclass

from pdd.agent.engine_link import FLUSH_LIMIT_S, EngineConnection
from pdd.agent.engine_outbox import EngineOutbox
from pdd.agent.events import EventLog
from pdd.agent.inbound import InboundHub
from pdd.agent.outbound import Outbound
from pdd.agent.peer import PeerLink
from pdd.agent.store import ChunkStore
from pdd.config.schema import EngineConfig, PddConfig
from pdd.core.fingerprint import differing_fields
from pdd.transport.base import Transport
from pdd.wire import local

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkKind:
    """What an engine says its chunks are."""

    fingerprint: dict[str, str]
    chunk_bytes: int
    chunk_tokens: int

    def equals(self, other: "ChunkKind") -> bool:
        """Whether chunks of one can be read by the other."""
        is_same_shape = (self.chunk_bytes, self.chunk_tokens) == (other.chunk_bytes, other.chunk_tokens)
        return is_same_shape and not differing_fields(self.fingerprint, other.fingerprint)


class Space:
    """See the module."""

    def __init__(
        self, config: PddConfig, engine_id: str, kind: ChunkKind, *, transport: Transport, events: EventLog
    ) -> None:
        """The store exists, and every other configured engine has a link.

        Raises:
            OverloadedError: If ``store_bytes`` is below one chunk.
        """
        self.kind = kind
        self._engine_id = engine_id
        self._events = events
        self._lease_s = config.agent.lease_s
        self._mirror: EngineOutbox | None = None
        self.store = ChunkStore(
            chunk_bytes=kind.chunk_bytes,
            capacity_bytes=config.engine(engine_id).store_bytes,
            on_added=lambda key: self._key_changed(key, is_present=True),
            on_removed=lambda key: self._key_changed(key, is_present=False),
        )
        self.inbound = InboundHub(self.store, lease_s=config.agent.lease_s, flush_engine=self._flush_engine)
        self.links: dict[str, PeerLink] = {}
        self._ways: dict[str, tuple[str, str, bool]] = {}
        self.outbound = Outbound(
            self.store, events, chunk_tokens=kind.chunk_tokens, piece_bytes=config.agent.piece_bytes
        )
        self.set_peers(config, transport)

    def set_peers(self, config: PddConfig, transport: Transport) -> None:
        """Every other engine of the configuration has a link, and no others; those that stay are not touched.

        What was on its way to a peer that goes, or that has another address now, has failed.
        """
        own = config.engine(self._engine_id)
        peers = {engine.id: engine for engine in config.engines if engine.id != own.id}
        ways = {peer: (e.data_address, e.site, config.uses_tls(e)) for peer, e in peers.items()}
        kept = {peer: link for peer, link in self.links.items() if self._ways[peer] == ways.get(peer)}
        gone = [link for peer, link in self.links.items() if peer not in kept]
        new = [engine for peer, engine in peers.items() if peer not in kept]
        links = {
            peer: kept.get(peer) or self._link(config, engine, transport) for peer, engine in peers.items()
        }
        self.links, self._ways = links, ways
        self.outbound.set_links(links)
        for link in gone:
            link.close()
        for engine in new:
            if own.role == "prefill" and engine.role != "prefill":
                # Peers that do not fit are known before the first transfer, and the first finds a warm line.
                links[engine.id].warm()

    def _link(self, config: PddConfig, engine: EngineConfig, transport: Transport) -> PeerLink:
        return PeerLink(
            own_id=self._engine_id,
            peer=engine.id,
            address=engine.data_address,
            is_wan=engine.site != config.engine(self._engine_id).site,
            settings=config.agent,
            fingerprint=self.kind.fingerprint,
            transport=transport,
            store=self.store,
            lock=self.outbound.lock,
            events=self._events,
        )

    def welcome(self, connection: EngineConnection) -> None:
        """The engine mirrors the store from now on: it has a snapshot, and gets every change after it."""
        with self.store.lock:
            self._mirror = connection.outbox
            connection.outbox.put(local.Welcome(version=local.LOCAL_VERSION, keys=self.store.keys()))

    def tick(self, now_s: float, *, stall_timeout_s: float) -> None:
        """About once a second: leases run out, and what has stalled too long has failed."""
        self.inbound.expire_leases(now_s)
        self.outbound.end_old_holds(now_s, limit_s=self._lease_s)
        self.inbound.drop_silent_sessions(now_s, timeout_s=stall_timeout_s)
        for link in self.links.values():
            link.tick(now_s)

    def close(self, *, reason: str, detail: str) -> None:
        """Every transfer has ended and every connection to a peer is closed."""
        self.outbound.close(reason=reason, detail=detail)
        for link in self.links.values():
            link.close()
        self.inbound.close()

    def _key_changed(self, key: bytes, *, is_present: bool) -> None:
        if self._mirror is not None:
            self._mirror.key_changed(key, is_present=is_present)

    def _flush_engine(self) -> None:
        mirror = self._mirror
        if mirror is not None and not mirror.flush(FLUSH_LIMIT_S):
            _log.warning("the engine does not read its socket; it learns later what has landed")
