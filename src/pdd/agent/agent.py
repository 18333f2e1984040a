"""The agent put together: engine socket, data port, and the space they share.

Knows no HTTP (``control``) and no process (``main``), so tests run several agents in one process.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from operator import attrgetter
from typing import Any, Final

from pdd.agent.coder import offered_codecs
from pdd.agent.connection import check_name, greeting_decoder, read_control_frame
from pdd.agent.engine_link import EngineConnection, EngineServer
from pdd.agent.events import EventLog
from pdd.agent.inbound_session import InboundSession
from pdd.agent.refusals import Refusals
from pdd.agent.space import ChunkKind, Space
from pdd.config.load import agent_socket
from pdd.config.schema import PddConfig
from pdd.core.errors import ConnectionLostError, PddError, RemoteProtocolError, UntrustedPeerError
from pdd.core.fingerprint import differing_fields
from pdd.transport.base import Stream, Transport
from pdd.transport.choice import choose_transport
from pdd.transport.tcp import join_address
from pdd.transport.unix import UnixListener
from pdd.wire import local
from pdd.wire.decoder import FrameDecoder
from pdd.wire.frames import PROBE_VERSION, WIRE_VERSION, Hello, HelloOk, Refused, encode_control

_log = logging.getLogger(__name__)
_HANDSHAKE_S: Final = 5.0
_MAX_CONNECTIONS: Final = 1024
"""Data-port connections at once; peers times streams stays far below."""
_MAX_STRANGERS: Final = 64
"""Connections without a HELLO at once. One more ends the oldest: an honest peer says it at once."""


class Agent:
    """One agent.

    Raises:
        ConfigurationError: If the engine's socket path cannot be used.
        ConnectError: If the data port or the socket cannot be bound.
    """

    def __init__(
        self,
        config: PddConfig,
        engine_id: str,
        *,
        transport: Transport,
        handshake_s: float = _HANDSHAKE_S,
    ) -> None:
        engine = config.engine(engine_id)
        self.config = config
        self.engine_id = engine_id
        self.events = EventLog()
        self.space: Space | None = None
        self._transport = transport
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._num_connections = 0
        self._sampler: str | None = None
        self._strangers: OrderedDict[Stream, None] = OrderedDict()
        self.refusals = Refusals()
        self._listener = transport.listen(join_address(engine.host, engine.data_port))
        try:
            socket = UnixListener(agent_socket(config, engine_id))
        except PddError:
            self._listener.close()
            raise
        self._engines = EngineServer(socket, self._attach_engine, self._engine_changed)

    @property
    def is_engine_connected(self) -> bool:
        """Whether an engine is served now."""
        return self._engines.current is not None

    def refusal_counts(self) -> dict[str, int]:
        """How many connections to the data port were refused, by reason."""
        return dict(Counter(self.refusals.counts()) + Counter(self._listener.refusals))

    def start(self) -> None:
        """Engines and peers can connect."""
        self._engines.start()
        threading.Thread(target=self._accept, name="pdd-data-accept", daemon=True).start()

    def stop(self) -> None:
        """Nothing is served any more, and the socket file is gone."""
        self._listener.close()
        self._engines.close()
        with self._lock:
            space, self.space = self.space, None
        if space is not None:
            space.close(reason="cancelled", detail="the agent was stopped")

    def tick(self) -> None:
        """To be called about once a second: deadlines, leases and pings."""
        space = self.space
        if space is not None:
            space.tick(time.monotonic(), stall_timeout_s=self.config.agent.stall_timeout_s)

    def apply(self, config: PddConfig) -> None:
        """The peers of ``config`` are the peers from now on; everything else in it needs a restart.

        Raises:
            ConfigurationError: If it has a peer that needs TLS, and the files for that cannot be used.
        """
        own = self.config.engine(self.engine_id)
        peers = tuple(engine for engine in config.engines if engine.id != self.engine_id)
        if sorted((own, *peers), key=attrgetter("id")) == sorted(self.config.engines, key=attrgetter("id")):
            return  # the file was only touched: a transport is not made for nothing, NIXL's least of all
        changed = self.config.model_copy(update={"engines": (own, *peers)})
        transport = choose_transport(changed, self.engine_id)
        with self._lock:
            self.config, self._transport = changed, transport
            space = self.space
            if space is not None:
                space.set_peers(changed, transport)

    def state(self) -> dict[str, Any]:
        """The answer to ``GET /v1/state``."""
        space = self.space
        counts = space.store.counts() if space else None
        return {
            "engine_id": self.engine_id,
            "engine_connected": self.is_engine_connected,
            "sampler": self._sampler,
            "fingerprint": space.kind.fingerprint if space else None,
            "chunk_tokens": space.kind.chunk_tokens if space else None,
            "chunk_bytes": space.kind.chunk_bytes if space else None,
            "store": {
                "slots": counts.slots if counts else 0,
                "used": counts.used if counts else 0,
                "leased": counts.leased if counts else 0,
            },
            "transfers": space.outbound.num_transfers() + space.inbound.num_transfers() if space else 0,
            "peers": [link.describe() for link in space.links.values()] if space else [],
            "refused": self.refusal_counts(),
            "refused_lately": self.refusals.recent(),
        }

    def _attach_engine(self, connection: EngineConnection, hello: local.Hello) -> Space:
        kind = ChunkKind(
            fingerprint=hello.fingerprint, chunk_bytes=hello.chunk_bytes, chunk_tokens=hello.chunk_tokens
        )
        with self._lock:
            old = self.space
            if old is None or not old.kind.equals(kind):
                self.space = Space(
                    self.config, self.engine_id, kind, transport=self._transport, events=self.events
                )
            space = self.space
            self._sampler = hello.sampler
        assert space is not None
        if old is not None and old is not space:
            _log.warning("the engine's chunks changed; the store starts empty")
            old.close(reason="incompatible", detail="the engine came back with other chunks")
        space.welcome(connection)
        return space

    def _engine_changed(self) -> None:
        self.events.emit("engine", {"connected": self.is_engine_connected})

    def _accept(self) -> None:
        while True:
            try:
                stream = self._listener.accept()
            except ConnectionLostError:
                return
            with self._lock:
                is_full = self._num_connections >= _MAX_CONNECTIONS
                self._num_connections += not is_full
            if is_full:
                self.refusals.note("too_many", address=stream.peer_address, detail="too many connections")
                stream.close()
                continue
            self._make_room_for(stream)
            threading.Thread(target=self._serve, args=(stream,), name="pdd-in", daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        """The connection has been served to its end."""
        try:
            self._greet(stream)
        except PddError as error:
            _log.info("connection from %s dropped: %s", stream.peer_address, error)
        finally:
            stream.close()
            with self._lock:
                self._strangers.pop(stream, None)
                self._num_connections -= 1

    def _make_room_for(self, stream: Stream) -> None:
        with self._lock:
            is_crowded = len(self._strangers) >= _MAX_STRANGERS
            oldest = self._strangers.popitem(last=False)[0] if is_crowded else None
            self._strangers[stream] = None
        if oldest is not None:
            self.refusals.note("too_many", address=oldest.peer_address, detail="too many without a HELLO")
            oldest.close()

    def _read_hello(self, stream: Stream, decoder: FrameDecoder) -> Hello:
        try:
            hello = read_control_frame(stream, decoder, timeout_s=self._handshake_s)
            if not isinstance(hello, Hello):
                raise RemoteProtocolError(f"{type(hello).__name__} before HELLO")
        except PddError as error:
            with self._lock:
                is_stranger = stream in self._strangers
            if is_stranger:  # else it was dropped for another's sake, and that was counted
                self.refusals.note_error(error, address=stream.peer_address)
            raise
        with self._lock:
            self._strangers.pop(stream, None)
        return hello

    def _greet(self, stream: Stream) -> None:
        decoder = greeting_decoder()
        hello = self._read_hello(stream, decoder)
        space = self.space
        refusal = self._refusal(hello, space, stream)
        if space is None or refusal is not None:
            self._refuse(stream, hello, refusal or self._refused("not_ready"))
            return
        session = self._session(space, hello, stream)
        if session is None:
            self._refuse(stream, hello, self._refused("unknown_session"))
            return
        settings = self.config.agent
        codec = next((name for name in hello.codecs if name in offered_codecs(settings.codec)), "")
        decoder.accept_peer(codec=codec)
        accepted = HelloOk(
            version=WIRE_VERSION, peer=self.engine_id, unasked_bytes=settings.unasked_bytes, codec=codec
        )
        if hello.stream == 0:
            session.outbox.put(accepted)
            session.serve_control(decoder)
        else:
            stream.send([encode_control(accepted)], timeout_s=_HANDSHAKE_S)
            session.serve_data(stream, decoder)

    def _refuse(self, stream: Stream, hello: Hello, refusal: Refused) -> None:
        if refusal.reason not in _HARMLESS:
            detail = "; ".join(refusal.fields)
            self.refusals.note(refusal.reason, address=stream.peer_address, peer=hello.peer, detail=detail)
        stream.send([encode_control(refusal)], timeout_s=_HANDSHAKE_S)

    def _refusal(self, hello: Hello, space: Space | None, stream: Stream) -> Refused | None:
        if hello.version == PROBE_VERSION:
            return self._refused("probe")
        try:
            check_name(stream, hello.peer)
        except UntrustedPeerError:
            names = ", ".join(sorted(stream.peer_names or ()))
            return self._refused("identity", f"peer: claims {hello.peer}, its certificate is for {names}")
        if hello.expected not in ("", self.engine_id):
            return self._refused("wrong_peer", f"peer: {hello.expected} is meant, this is {self.engine_id}")
        if hello.version != WIRE_VERSION:
            return self._refused("version", f"wire version: {hello.version} != {WIRE_VERSION}")
        if space is None:
            return self._refused("not_ready")
        return (
            self._refused("incompatible", *fields)
            if (fields := differing_fields(hello.fingerprint, space.kind.fingerprint))
            else None
        )

    def _refused(self, reason: str, *fields: str) -> Refused:
        return Refused(reason=reason, fields=list(fields), peer=self.engine_id)

    def _session(self, space: Space, hello: Hello, stream: Stream) -> InboundSession | None:
        if hello.stream == 0:
            return space.inbound.open_session(hello.peer, hello.session, stream)
        return space.inbound.session(hello.peer, hello.session)


_HARMLESS: Final = ("probe", "not_ready", "unknown_session")
"""Refusals that say nothing bad about the peer: it asks again, or came late."""
