"""The way to one peer: connected when first needed, kept warm, made anew when it breaks.

A thread per link dials and reads the control connection; a session has one more thread per data stream.
Everything that changes a link happens under the sending side's lock (``Outbound.lock``).
"""

import logging
import secrets
import threading
import time
from collections import Counter
from typing import Any, Final

from pdd.agent.answers import Answers
from pdd.agent.backoff import Backoff
from pdd.agent.coder import LinkCoder, offered_codecs
from pdd.agent.connection import Identity, introduce
from pdd.agent.events import EventLog
from pdd.agent.outbound_leg import Leg
from pdd.agent.outbound_session import OutboundSession
from pdd.agent.outbound_stream import OutboundStream
from pdd.agent.stats import LossMeter, RateMeter
from pdd.agent.store import ChunkStore
from pdd.config.schema import AgentConfig
from pdd.core.errors import IncompatiblePeerError, ProtocolError, TransportError, UntrustedPeerError
from pdd.core.fingerprint import Fingerprint
from pdd.policy.unasked import UnaskedParams
from pdd.transport.base import Stream, Transport
from pdd.wire.decoder import FrameDecoder

_log = logging.getLogger(__name__)
_LINK_EVENT_PERIOD_S: Final = 0.5


class PeerLink:
    """See the module; made once per configured peer, without a thread until something is to be sent."""

    def __init__(
        self,
        *,
        own_id: str,
        peer: str,
        address: str,
        is_wan: bool,
        settings: AgentConfig,
        fingerprint: Fingerprint,
        transport: Transport,
        store: ChunkStore,
        lock: threading.RLock,
        events: EventLog,
    ) -> None:
        self.peer = peer
        self.is_wan = is_wan
        self.attempts: Counter[str] = Counter()
        """Connection attempts by result: ``up`` or what went wrong, for metrics."""
        self.rate = RateMeter()
        self.answers = Answers(UnaskedParams())
        self.coder = LinkCoder(settings.codec, num_threads=settings.streams)
        self.num_sent_bytes = 0
        self.settings = settings
        self.store = store
        self.lock = lock
        self._own_id = own_id
        self._address = address
        self._fingerprint = fingerprint
        self._transport = transport
        self._events = events
        self._loss = LossMeter()
        self._legs: list[Leg] = []
        self._session: OutboundSession | None = None
        self._state = "idle"
        self._reason: str | None = None
        self._reported_bytes = 0
        self._reported_s = 0.0
        self._backoff = Backoff()
        self._thread: threading.Thread | None = None

    # For the sending side and its legs, under its lock.

    def attach(self, leg: Leg) -> None:
        """The leg is carried by the link from now on."""
        self._legs.append(leg)
        if self._session is not None:
            self._session.open(leg)
        elif self._state == "down":
            leg.stalled(detail=self._reason or "the link is down")
        self.warm()

    def detach(self, leg: Leg) -> None:
        """The leg has ended."""
        if leg in self._legs:
            self._legs.remove(leg)
        if not self._queued_bytes():
            self.rate.idle()
            if self._reported_bytes:
                self._report()

    # For the session.

    def dial(self) -> Stream:
        """A new connection to the peer; who answers is not known yet.

        Raises:
            TransportError: If nobody answers in time, or one who is not trusted.
        """
        return self._transport.dial(self._address, timeout_s=self.settings.connect_timeout_s)

    def sent(self, num_bytes: int) -> None:
        """So many bytes of DATA go out; called under the lock."""
        self.num_sent_bytes += num_bytes

    def acknowledged(self, num_bytes: int) -> None:
        """So many bytes of KV have arrived, or some that were on their way are no longer awaited."""
        now_s = time.monotonic()
        with self.lock:
            is_drained = not self._queued_bytes()
            self.rate.acknowledged(num_bytes, is_drained=is_drained, now_s=now_s)
            # The last word on a queue must be that it is empty, or the router counts it for ever.
            stale = is_drained and self._reported_bytes > 0
            if stale or now_s - self._reported_s >= _LINK_EVENT_PERIOD_S:
                self._report()

    # For the agent.

    def warm(self) -> None:
        """The link connects now, if it is not up, and stays connected."""
        self._backoff.hurry()
        with self.lock:
            if self._thread is None and not self._backoff.is_closed:
                self._thread = threading.Thread(target=self._run, name=f"pdd-link-{self.peer}", daemon=True)
                self._thread.start()

    def describe(self) -> dict[str, Any]:
        """The link object of the control API."""
        with self.lock:
            session = self._session
            if session is not None:
                self._loss.update(*session.segments())
            return {
                "peer": self.peer,
                "address": self._address,
                "state": self._state,
                "reason": self._reason,
                "breaker": "open" if self._backoff.is_breaker_open else "closed",
                "rate_bytes_per_s": self.rate.rate_bytes_per_s,
                "queued_bytes": self._queued_bytes(),
                "rtt_s": session.trip.rtt_s if session is not None else None,
                "loss_ratio": self._loss.ratio,
            }

    def tick(self, now_s: float) -> None:
        """About once a second: an active session is pinged, and what has stalled too long has failed."""
        with self.lock:
            if not self._legs:
                return
            for leg in list(self._legs):
                leg.check_progress(now_s, timeout_s=self.settings.stall_timeout_s, link_reason=self._reason)
            if self._session is not None:
                self._session.ping(now_s)

    def close(self) -> None:
        """The link is closed for good; its thread ends soon."""
        self._backoff.close()
        with self.lock:
            session = self._session
        if session is not None:
            session.close()

    # The link's own thread.

    def _run(self) -> None:
        while self._backoff.wait_for_turn():
            try:
                session, decoder = self._connect()
            except IncompatiblePeerError as error:
                self._incompatible(error)
            except (TransportError, ProtocolError) as error:
                self._unreachable(error)
            else:
                self._set_up(session)
                self._set_down(session, session.serve(decoder))

    def _connect(self) -> tuple[OutboundSession, FrameDecoder]:
        settings = self.settings
        identity = Identity(
            peer=self._own_id,
            session=secrets.token_hex(8),
            fingerprint=self._fingerprint,
            codecs=offered_codecs(settings.codec),
        )
        stream = self.dial()
        try:
            decoder, accepted = introduce(
                stream,
                identity,
                expected=self.peer,
                stream_index=0,
                timeout_s=settings.connect_timeout_s,
            )
        except (TransportError, ProtocolError):
            stream.close()
            raise
        session = OutboundSession(self, identity, stream, accepted=accepted)
        for index in range(1, settings.streams + 1):
            threading.Thread(
                target=OutboundStream(session, index).run, name=f"pdd-data-{self.peer}-{index}", daemon=True
            ).start()
        return session, decoder

    def _set_up(self, session: OutboundSession) -> None:
        with self.lock:
            self._backoff.num_failures = 0
            self.attempts["up"] += 1
            self._session = session
            self._change("up", None)
            session.ping(time.monotonic())
            for leg in self._legs:
                session.open(leg)
            if self._backoff.is_closed:
                session.close()

    def _set_down(self, session: OutboundSession, reason: str) -> None:
        with self.lock:
            self._session = None
            self.rate.idle()
            if self._backoff.is_closed:
                return
            _log.warning("link to %s lost: %s", self.peer, reason)
            self._change("down", reason)
            for leg in session.legs.values():
                leg.lost(detail=reason)

    def _unreachable(self, error: TransportError | ProtocolError) -> None:
        reason = str(error)
        with self.lock:
            was_down, was_open = self._state == "down", self._backoff.is_breaker_open
            self._backoff.num_failures += 1
            self.attempts["untrusted" if isinstance(error, UntrustedPeerError) else "failed"] += 1
            self._change("down", reason)
            if not was_down or self._backoff.is_breaker_open > was_open:
                num_failures = self._backoff.num_failures
                _log.warning("link to %s is down after %d attempts: %s", self.peer, num_failures, reason)
                self._report()
            if not was_down:
                for leg in self._legs:
                    leg.stalled(detail=reason)

    def _incompatible(self, error: IncompatiblePeerError) -> None:
        with self.lock:
            self._backoff.num_failures += 1
            self.attempts["incompatible"] += 1
            if self._state != "incompatible":
                _log.error("link to %s: %s", self.peer, error)
            self._change("incompatible", str(error))
            for leg in list(self._legs):
                leg.stop(reason="incompatible", detail=str(error))

    def _change(self, state: str, reason: str | None) -> None:
        if (state, reason) != (self._state, self._reason):
            self._state, self._reason = state, reason
            self._report()

    def _report(self) -> None:
        if self._backoff.is_closed:
            return  # an attempt that ends late must not speak for the link that the peer may have by now
        described = self.describe()
        self._reported_s, self._reported_bytes = time.monotonic(), described["queued_bytes"]
        self._events.emit("link", described)

    def _queued_bytes(self) -> int:
        return sum(leg.machine.outstanding_bytes for leg in self._legs)
