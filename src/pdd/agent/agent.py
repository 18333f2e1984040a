"""The agent put together: engine socket, data port, and the space they share.

Knows no HTTP (``control``) and no process (``main``), so tests run several agents in one process.
"""

import logging
import threading
import time
from typing import Any, Final

from pdd.agent.connection import read_control_frame
from pdd.agent.engine_link import EngineConnection, EngineServer
from pdd.agent.events import EventLog
from pdd.agent.inbound_session import InboundSession
from pdd.agent.space import ChunkKind, Space
from pdd.config.load import agent_socket
from pdd.config.schema import PddConfig
from pdd.core.errors import ConnectionLostError, PddError, RemoteProtocolError
from pdd.core.fingerprint import differing_fields
from pdd.transport.base import Stream, Transport
from pdd.transport.tcp import join_address
from pdd.transport.unix import UnixListener
from pdd.wire import local
from pdd.wire.decoder import FrameDecoder
from pdd.wire.frames import WIRE_VERSION, Hello, HelloOk, Refused, encode_control

_log = logging.getLogger(__name__)
_HANDSHAKE_S: Final = 5.0
_MAX_CONNECTIONS: Final = 1024
"""Data-port connections at once; peers times streams stays far below."""


class Agent:
    """One agent.

    Raises:
        ConfigurationError: If the engine's socket path cannot be used.
        ConnectError: If the data port or the socket cannot be bound.
    """

    def __init__(self, config: PddConfig, engine_id: str, *, transport: Transport) -> None:
        engine = config.engine(engine_id)
        self.config = config
        self.engine_id = engine_id
        self.events = EventLog()
        self.space: Space | None = None
        self._transport = transport
        self._lock = threading.Lock()
        self._num_connections = 0
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

    def state(self) -> dict[str, Any]:
        """The answer to ``GET /v1/state``."""
        space = self.space
        counts = space.store.counts() if space else None
        return {
            "engine_id": self.engine_id,
            "engine_connected": self.is_engine_connected,
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
                stream.close()
                continue
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
                self._num_connections -= 1

    def _greet(self, stream: Stream) -> None:
        decoder = FrameDecoder()
        hello = read_control_frame(stream, decoder, timeout_s=_HANDSHAKE_S)
        if not isinstance(hello, Hello):
            raise RemoteProtocolError(f"{type(hello).__name__} before HELLO")
        space = self.space
        refusal = self._refusal(hello, space)
        if space is None or refusal is not None:
            stream.send([encode_control(refusal or _NOT_READY)], timeout_s=_HANDSHAKE_S)
            return
        session = self._session(space, hello, stream)
        if session is None:
            refusal = Refused(reason="unknown_session", fields=[])
            stream.send([encode_control(refusal)], timeout_s=_HANDSHAKE_S)
            return
        accepted = HelloOk(version=WIRE_VERSION, peer=self.engine_id)
        if hello.stream == 0:
            session.outbox.put(accepted)
            session.serve_control(decoder)
        else:
            stream.send([encode_control(accepted)], timeout_s=_HANDSHAKE_S)
            session.serve_data(stream, decoder)

    def _refusal(self, hello: Hello, space: Space | None) -> Refused | None:
        if hello.version != WIRE_VERSION:
            return Refused(reason="version", fields=[f"wire version: {hello.version} != {WIRE_VERSION}"])
        if space is None:
            return _NOT_READY
        if fields := differing_fields(hello.fingerprint, space.kind.fingerprint):
            return Refused(reason="incompatible", fields=list(fields))
        return None

    def _session(self, space: Space, hello: Hello, stream: Stream) -> InboundSession | None:
        if hello.stream == 0:
            return space.inbound.open_session(hello.peer, hello.session, stream)
        return space.inbound.session(hello.peer, hello.session)


_NOT_READY: Final = Refused(reason="not_ready", fields=[])
