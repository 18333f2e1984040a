"""The Unix socket of the engine beside this agent: its messages, its primary tier, its mirror of the store.

The reader thread of a connection makes all copies of that engine, inline and in order: a copy of a few
megabytes takes less time than waking another thread. A connection's socket is never closed while one of
its copies runs, since the engine takes the end of the socket as the end of all access to its memory.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from pdd.agent.engine_outbox import EngineOutbox
from pdd.agent.outbound import StoredChunk
from pdd.agent.primary import PrimaryTier
from pdd.agent.send_queue import Urgency
from pdd.core.errors import (
    ConnectionLostError,
    PddError,
    RemoteProtocolError,
    TransportError,
)
from pdd.transport.unix import UnixListener, UnixStream
from pdd.wire import local

AttachFn = Callable[["EngineConnection", local.Hello], "Space"]
ChangeFn = Callable[[], None]

if TYPE_CHECKING:
    from pdd.agent.space import Space

_log = logging.getLogger(__name__)
_RECV_BYTES: Final = 256 * 2**10
FLUSH_LIMIT_S: Final = 1.0
"""How long LANDED waits for an engine that does not read its socket."""


class EngineConnection:
    """One connection of the engine, from Hello to its end; ``serve`` runs in the caller's thread."""

    def __init__(self, stream: UnixStream, server: "EngineServer") -> None:
        self.stream = stream
        self.outbox = EngineOutbox(stream)
        self._server = server
        self._copying = threading.Lock()
        self._is_closed = False
        self._decoder = local.EngineDecoder()
        self._fds: list[int] = []
        self._requests: set[str] = set()

    def serve(self) -> None:
        """The connection has ended, and all it held is given back."""
        space: Space | None = None
        tier: PrimaryTier | None = None
        try:
            hello, rest = self._read_hello()
            if hello is None:
                return
            tier = self._map(hello)
            space = self._server.attach(self, hello)
            self._dispatch(space, tier, rest)
            while data := self._recv():
                self._dispatch(space, tier, self._decoder.feed(data))
        except TransportError as error:
            _log.info("engine connection ended: %s", error)
        except PddError as error:
            _log.error("engine refused: %s", error)
            self._refuse(str(error))
        finally:
            self._end(space, tier)

    def close(self) -> None:
        """The connection ends as soon as no copy runs."""
        with self._copying:
            self._is_closed = True
            self.stream.close()

    def _refuse(self, reason: str) -> None:
        """The engine has been told why it is not served, if it reads."""
        self.outbox.close()
        with suppress(TransportError):
            self.stream.send([local.encode(local.Refused(reason=reason))], timeout_s=FLUSH_LIMIT_S)

    def _read_hello(self) -> tuple[local.Hello | None, Sequence[local.FromEngine]]:
        messages: list[local.FromEngine] = []
        while not messages:
            data = self._recv()
            if not data:
                return None, []
            messages = self._decoder.feed(data)
        hello = messages[0]
        if not isinstance(hello, local.Hello):
            raise RemoteProtocolError(f"{type(hello).__name__} before Hello")
        if hello.version != local.LOCAL_VERSION:
            raise RemoteProtocolError(
                f"local protocol {hello.version}, but the agent speaks {local.LOCAL_VERSION}"
            )
        return hello, messages[1:]

    def _recv(self) -> bytes:
        data, fds = self.stream.recv_with_fds(_RECV_BYTES)
        self._fds += fds
        return data

    def _map(self, hello: local.Hello) -> PrimaryTier:
        if len(self._fds) != 1:
            raise RemoteProtocolError(f"Hello came with {len(self._fds)} file descriptors instead of one")
        return PrimaryTier(self._fds[0], hello)

    def _dispatch(self, space: "Space", tier: PrimaryTier, messages: Sequence[local.FromEngine]) -> None:
        for message in messages:
            match message:
                case local.StoreChunks():
                    self._store(space, tier, message)
                case local.LoadChunks():
                    self._load(space, tier, message)
                case local.Touch(keys=keys):
                    space.store.touch(keys)
                case local.BeginTransfer():
                    self._requests.add(message.request)
                    space.outbound.begin(
                        request=message.request,
                        transfer=message.transfer,
                        targets=message.targets,
                        prompt_tokens=message.prompt_tokens,
                        num_chunks=message.num_chunks,
                        urgency=Urgency(
                            priority=message.priority, is_unmasked=message.unmasked, is_held=message.hold
                        ),
                    )
                case local.FinishRequest(request=request):
                    self._requests.discard(request)
                    space.outbound.finished(request)
                case local.Hello():
                    raise RemoteProtocolError("a second Hello")

    def _store(self, space: "Space", tier: PrimaryTier, job: local.StoreChunks) -> None:
        if not len(job.keys) == len(job.slots) == len(job.end_tokens):
            raise RemoteProtocolError("StoreChunks with lists of unequal length")
        stored: list[StoredChunk] = []
        try:
            with self._may_copy():
                for key, slot, end_tokens in zip(job.keys, job.slots, job.end_tokens, strict=True):
                    if self._copy_in(space, tier, key, slot):
                        stored.append(StoredChunk(key=key, end_tokens=end_tokens))
            self.outbox.put(local.StoreDone(job=job.job))
            space.outbound.stored(job.request, stored)
            if len(stored) < len(job.keys):
                _log.warning("request %s: no room in the store for all its chunks", job.request)
                space.outbound.not_stored(job.request)
        finally:
            space.store.release([chunk.key for chunk in stored])

    @contextmanager
    def _may_copy(self) -> Iterator[None]:
        """The connection stays open meanwhile.

        Raises:
            ConnectionLostError: If it was closed: the engine has taken its memory back.
        """
        with self._copying:
            if self._is_closed:
                raise ConnectionLostError("the engine connection was replaced")
            yield

    def _copy_in(self, space: "Space", tier: PrimaryTier, key: bytes, slot: int) -> bool:
        """Whether the store has the chunk now, leased for the caller."""
        row = tier.row(slot)
        if space.store.lease(key):
            return True
        landing = space.store.reserve_anyway(key)
        if landing is None:
            return False
        np.copyto(landing.row, row)  # releases the GIL
        space.store.commit(landing)
        return True

    def _load(self, space: "Space", tier: PrimaryTier, job: local.LoadChunks) -> None:
        if len(job.keys) != len(job.slots):
            raise RemoteProtocolError("LoadChunks with lists of unequal length")
        loaded: list[bytes] = []
        with self._may_copy():
            for key, slot in zip(job.keys, job.slots, strict=True):
                row = tier.row(slot)
                if space.store.lease(key):
                    np.copyto(row, space.store.row(key))
                    space.store.release([key])
                    loaded.append(key)
        self.outbox.put(local.LoadDone(job=job.job, loaded=loaded))

    def _end(self, space: "Space | None", tier: PrimaryTier | None) -> None:
        self._server.detach(self)
        self.outbox.close()
        self.stream.close()
        if space is not None:
            for request in self._requests:
                space.outbound.finished(request)
        if tier is not None:
            tier.close()
        for fd in self._fds:
            os.close(fd)


class EngineServer:
    """Takes engine connections; the newest one is served, an older one is closed."""

    def __init__(self, listener: UnixListener, attach: AttachFn, on_change: ChangeFn) -> None:
        self._listener = listener
        self._attach = attach
        self._on_change = on_change
        self._lock = threading.Lock()
        self._current: EngineConnection | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pdd-engine-accept", daemon=True)

    @property
    def current(self) -> EngineConnection | None:
        """The connection that is served now."""
        return self._current

    def start(self) -> None:
        """Engines can connect."""
        self._thread.start()

    def attach(self, connection: EngineConnection, hello: local.Hello) -> "Space":
        """The connection is the current one, and has been welcomed.

        Raises:
            PddError: If the agent cannot serve such an engine.
        """
        with self._lock:
            stale, self._current = self._current, None
        if stale is not None:
            _log.info("a new engine connection replaces the old one")
            stale.close()
        space = self._attach(connection, hello)
        with self._lock:
            self._current = connection
        self._on_change()
        return space

    def detach(self, connection: EngineConnection) -> None:
        """The connection is not the current one."""
        with self._lock:
            if self._current is not connection:
                return
            self._current = None
        self._on_change()

    def close(self) -> None:
        """No engine is served."""
        self._listener.close()
        with self._lock:
            self._is_closed = True
            current = self._current
        if current is not None:
            current.close()

    def _run(self) -> None:
        while True:
            try:
                stream = self._listener.accept()
            except TransportError:
                return
            connection = EngineConnection(stream, self)
            threading.Thread(target=connection.serve, name="pdd-engine-in", daemon=True).start()
