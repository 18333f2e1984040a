"""The way to one peer: connected when first needed, kept warm, made anew when it breaks.

A thread per link dials and reads the control connection; a session has one more thread per data stream.
Everything that changes a link happens under the sending side's lock (``Outbound.lock``).
"""

import logging
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdd.agent.answers import Answers
from pdd.agent.coder import CodecMode, LinkCoder, offered_codecs
from pdd.agent.connection import FrameCount, Identity, introduce, read_frames
from pdd.agent.events import EventLog
from pdd.agent.out_session import OutSession
from pdd.agent.outbound import Leg, Outbound
from pdd.agent.send_queue import Piece
from pdd.agent.stats import LossMeter, RateMeter, RoundTrip
from pdd.agent.store import ChunkStore
from pdd.core.errors import (
    IncompatiblePeerError,
    ProtocolError,
    RemoteProtocolError,
    TransportError,
    UntrustedPeerError,
)
from pdd.core.fingerprint import Fingerprint
from pdd.policy.unasked import UnaskedParams, UnaskedSnapshot, decide_unasked
from pdd.transport.base import Buffer, Stream, Transport
from pdd.wire import sender as tx
from pdd.wire.codec import BF16_SPLIT, Bf16Codec
from pdd.wire.decoder import ControlReceived, FrameDecoder
from pdd.wire.frames import (
    DATA_HEADER_BYTES,
    Ack,
    ControlFrame,
    Failed,
    Landed,
    Ping,
    Pong,
    Want,
    encode_data_header,
)

_log = logging.getLogger(__name__)
_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 5.0
_LINK_EVENT_PERIOD_S: Final = 0.5
_SILENT_S: Final = 3.0
"""A peer with open transfers that says nothing for so long is reported; pings ask it every second."""
_UNASKED: Final = UnaskedParams()
_BREAKER_FAILURES: Final = 3
"""Failed attempts in a row that open the breaker: from then on calls are spaced, whoever wants one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What all links of an agent share."""

    own_id: str
    streams: int
    piece_bytes: int
    connect_timeout_s: float
    stall_timeout_s: float
    max_rate_bytes_per_s: float | None
    unasked_bytes: int
    codec: CodecMode

    @property
    def silence_limit_s(self) -> float:
        """How long a peer with open transfers may say nothing before its session is given up.

        Well below the stall timeout: an idle flow that a middlebox forgot is replaced in time.
        """
        return min(self.stall_timeout_s, max(_SILENT_S, self.stall_timeout_s / 3))


class PeerLink:
    """See the module; made once per configured peer, without a thread until something is to be sent."""

    def __init__(
        self,
        *,
        peer: str,
        address: str,
        is_wan: bool,
        settings: LinkSettings,
        fingerprint: Fingerprint,
        transport: Transport,
        store: ChunkStore,
        outbound: Outbound,
        events: EventLog,
    ) -> None:
        self.peer = peer
        self.is_wan = is_wan
        self.attempts: Counter[str] = Counter()
        """Connection attempts by result: ``up`` or what went wrong, for metrics."""
        self.rate = RateMeter()
        self.trip = RoundTrip()
        self.loss = LossMeter()
        self.answers = Answers(_UNASKED)
        self.coder = LinkCoder(settings.codec, num_threads=settings.streams)
        self.num_sent_bytes = 0
        self._address = address
        self._settings = settings
        self._fingerprint = fingerprint
        self._transport = transport
        self._store = store
        self._outbound = outbound
        self._events = events
        self._legs: list[Leg] = []
        self._session: OutSession | None = None
        self._state = "idle"
        self._reason: str | None = None
        self._reported_bytes = 0
        self._reported_s = 0.0
        self._wake = threading.Condition()
        self._is_closed = False
        self._has_work = False
        self._is_urgent = False
        self._thread: threading.Thread | None = None
        self._attempted_s = -_MAX_RETRY_S
        self._num_failures = 0

    # What Outbound calls, under its lock.

    def attach(self, leg: Leg) -> None:
        """See ``Link.attach``."""
        self._legs.append(leg)
        if self._session is not None:
            self._open(self._session, leg)
        elif self._state == "down":
            self._outbound.stalled(leg, detail=self._reason or "the link is down")
        self.warm()

    def warm(self) -> None:
        """The link connects now, if it is not up, and stays connected; callable without the lock too."""
        with self._wake:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=f"pdd-link-{self.peer}", daemon=True)
                self._thread.start()
            self._has_work = self._is_urgent = True
            self._wake.notify()

    def detach(self, leg: Leg) -> None:
        """See ``Link.detach``."""
        if leg in self._legs:
            self._legs.remove(leg)
        if self._session is not None and self._session.legs.get(leg.machine.number) is leg:
            del self._session.legs[leg.machine.number]
        if not self._queued_bytes():
            self.rate.idle()
            if self._reported_bytes:
                self._report()

    def send(self, frame: ControlFrame) -> None:
        """See ``Link.send``."""
        if self._session is not None:
            self._session.outbox.put(frame)

    def enqueue(self, leg: Leg, pieces: Sequence[Piece]) -> None:
        """See ``Link.enqueue``."""
        if self._session is not None:
            self.rate.busy(time.monotonic())
            self._session.queue.put(pieces, rank=leg.transfer.rank, urgency=leg.transfer.urgency)

    def num_unasked_chunks(self) -> int:
        """See ``Link.num_unasked_chunks``."""
        if self._session is None:
            return 0
        snapshot = UnaskedSnapshot(
            rtt_s=self.trip.rtt_s,
            rate_bytes_per_s=self.rate.rate_bytes_per_s,
            outstanding_bytes=self._queued_bytes(),
            unasked_bytes=sum(leg.machine.unasked_bytes for leg in self._legs),
            credit_bytes=min(self._session.accepted.unasked_bytes, self._settings.unasked_bytes),
            chunk_bytes=self._store.chunk_bytes,
        )
        return decide_unasked(snapshot, _UNASKED).num_chunks

    def withdraw(self, leg: Leg, indices: Sequence[int]) -> None:
        """See ``Link.withdraw``."""
        if self._session is not None:
            self._session.queue.discard_chunks(leg.machine.number, frozenset(indices))

    def unqueue(self, leg: Leg) -> None:
        """See ``Link.unqueue``."""
        if self._session is not None:
            self._session.queue.discard(leg.machine.number)

    # What the agent calls.

    def describe(self) -> dict[str, Any]:
        """The link object of the control API."""
        with self._outbound.lock:
            if self._session is not None:
                self.loss.update(*self._session.segments())
            return {
                "peer": self.peer,
                "address": self._address,
                "state": self._state,
                "reason": self._reason,
                "breaker": "open" if self._num_failures >= _BREAKER_FAILURES else "closed",
                "rate_bytes_per_s": self.rate.rate_bytes_per_s,
                "queued_bytes": self._queued_bytes(),
                "rtt_s": self.trip.rtt_s,
                "loss_ratio": self.loss.ratio,
            }

    def tick(self, now_s: float) -> None:
        """About once a second: active sessions are pinged, and what has stalled too long has failed."""
        with self._outbound.lock:
            session = self._session
            if not self._legs:
                return
            for leg in list(self._legs):
                self._check_stall(leg, session, now_s)
            if session is not None:
                self._ping(session, now_s)

    def close(self) -> None:
        """The link is closed for good; its thread ends soon."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        with self._outbound.lock:
            session = self._session
        if session is not None:
            session.close()

    # The link's own thread.

    def _run(self) -> None:
        while self._wait_for_turn():
            try:
                session, decoder = self._connect()
            except IncompatiblePeerError as error:
                self._incompatible(error)
            except (TransportError, ProtocolError) as error:
                self._unreachable(error)
            else:
                self._set_up(session)
                self._set_down(session, self._serve(session, decoder))

    def _wait_for_turn(self) -> bool:
        """Whether to connect: there is work, or the link was up, and the last attempt is long enough ago.

        News (a transfer) cut the back-off short, but never below a second after the last attempt.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._is_closed or self._has_work)
            pause_s = min(_MAX_RETRY_S, _MIN_RETRY_S * 2 ** max(0, self._num_failures - 1))
            turn_s = self._attempted_s + pause_s * random.uniform(1.0, 1.3)
            self._wake.wait_for(
                lambda: self._is_closed or self._is_urgent, max(0.0, turn_s - time.monotonic())
            )
            turn_s = min(turn_s, self._attempted_s + _MIN_RETRY_S * random.uniform(1.0, 1.3))
            self._wake.wait_for(lambda: self._is_closed, max(0.0, turn_s - time.monotonic()))
            self._attempted_s = time.monotonic()
            self._is_urgent = False
            return not self._is_closed

    def _connect(self) -> tuple[OutSession, FrameDecoder]:
        settings = self._settings
        identity = Identity(
            peer=settings.own_id,
            session=secrets.token_hex(8),
            fingerprint=self._fingerprint,
            codecs=offered_codecs(settings.codec),
        )
        stream = self._transport.dial(self._address, timeout_s=settings.connect_timeout_s)
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
        session = OutSession(identity, stream, name=self.peer, accepted=accepted)
        for index in range(1, settings.streams + 1):
            threading.Thread(
                target=self._run_data,
                args=(session, index),
                name=f"pdd-data-{self.peer}-{index}",
                daemon=True,
            ).start()
        return session, decoder

    def _serve(self, session: OutSession, decoder: FrameDecoder) -> str:
        """The session has ended; returns why."""
        count = FrameCount()
        try:
            for event in read_frames(session.control, decoder, lambda _header: None):
                if not isinstance(event, ControlReceived):
                    raise RemoteProtocolError("DATA on the control connection")
                count.add(event.frame)
                self._on_frame(session, event)
        except (ProtocolError, TransportError) as error:
            return session.reason or str(error)
        finally:
            session.close()
        return session.reason or f"{self.peer} closed the connection"

    def _on_frame(self, session: OutSession, event: ControlReceived) -> None:
        session.heard_s = time.monotonic()
        match event.frame:
            case Pong(nonce=nonce):
                self.trip.pong(nonce, time.monotonic())
                session.is_silent = False
            case Want(number=number, indices=indices, pieces=pieces, answered=answered):
                want = tx.WantSeen(indices=indices, pieces=pieces, answered=answered)
                self._on_leg(session, number, want, event)
                self._acknowledged(session, 0)  # what was sent in vain is no longer awaited
            case Ack(number=number, indices=indices):
                self._on_leg(session, number, tx.AckSeen(indices=indices), event)
                self._acknowledged(session, len(indices) * self._store.chunk_bytes)
            case Landed(number=number):
                self._on_leg(session, number, tx.LandedSeen(), event)
            case Failed(number=number, reason=reason, detail=detail):
                self._on_leg(session, number, tx.FailedSeen(reason=reason, detail=detail), event)
            case _:
                raise RemoteProtocolError(f"{type(event.frame).__name__} from the receiving side")

    def _on_leg(self, session: OutSession, number: int, event: tx.Event, frame: ControlReceived) -> None:
        with self._outbound.lock:
            leg = session.legs.get(number)
            if leg is not None:
                self._outbound.received(leg, event, num_bytes=frame.num_bytes)
            elif number >= session.num_opened:
                raise RemoteProtocolError(f"transfer {number} was never offered")

    def _acknowledged(self, session: OutSession, num_bytes: int) -> None:
        now_s = time.monotonic()
        with self._outbound.lock:
            session.moved_s = now_s
            is_drained = not self._queued_bytes()
            self.rate.acknowledged(num_bytes, is_drained=is_drained, now_s=now_s)
            # The last word on a queue must be that it is empty, or the router counts it for ever.
            stale = is_drained and self._reported_bytes > 0
            if stale or now_s - self._reported_s >= _LINK_EVENT_PERIOD_S:
                self._report()

    # Data threads.

    def _run_data(self, session: OutSession, index: int) -> None:
        try:
            stream = self._dial_data(session, index)
        except (TransportError, ProtocolError) as error:
            _log.warning("data stream %d to %s: %s", index, self.peer, error)
            if session.data_stream_failed(self._settings.streams):
                session.close(f"no data stream to {self.peer}: {error}")
            return
        try:
            settings = self._settings
            codec = Bf16Codec() if session.accepted.codec == BF16_SPLIT else None
            while pieces := session.queue.take(settings.piece_bytes, num_takers=settings.streams):
                self._send_pieces(session, stream, pieces, codec)
        except TransportError as error:
            session.close(str(error))

    def _dial_data(self, session: OutSession, index: int) -> Stream:
        timeout_s = self._settings.connect_timeout_s
        stream = self._transport.dial(self._address, timeout_s=timeout_s)
        session.add_stream(stream)
        introduce(stream, session.identity, expected=self.peer, stream_index=index, timeout_s=timeout_s)
        if self._settings.max_rate_bytes_per_s is not None:
            stream.limit_rate(self._settings.max_rate_bytes_per_s / self._settings.streams)
        return stream

    def _send_pieces(
        self, session: OutSession, stream: Stream, pieces: Sequence[Piece], codec: Bf16Codec | None
    ) -> None:
        """The pieces are on their way; chunks of a transfer that ended meanwhile may be gone and are not."""
        leased = [piece for piece in pieces if self._store.lease(piece.key)]
        buffers: list[Buffer] = []
        try:
            for piece in leased:
                row = self._store.row(piece.key).data
                payload = row[piece.offset : piece.offset + piece.length]
                coded = self._encode(codec, payload)
                header = encode_data_header(
                    number=piece.number,
                    index=piece.index,
                    offset=piece.offset,
                    payload=payload,
                    is_unasked=piece.is_unasked,
                    coded_bytes=None if coded is None else len(coded),
                )
                buffers += (header, payload if coded is None else coded)
                # Counted before it is sent: the peer's LANDED may be faster than this thread.
                self._count(session, piece, len(coded or payload))
            if buffers:
                stream.send(buffers)
                session.moved_s = time.monotonic()
        finally:
            self._store.release([piece.key for piece in leased])

    def _encode(self, codec: Bf16Codec | None, payload: memoryview) -> bytes | None:
        if codec is None:
            return None
        return self.coder.encode(codec, payload, rate_bytes_per_s=self.rate.rate_bytes_per_s)

    def _count(self, session: OutSession, piece: Piece, num_wire_bytes: int) -> None:
        wan_bytes = DATA_HEADER_BYTES + num_wire_bytes
        with self._outbound.lock:
            self.num_sent_bytes += wan_bytes
            leg = session.legs.get(piece.number)
            if leg is not None:
                self._outbound.sent(leg, wan_bytes=wan_bytes, payload_bytes=piece.length)

    # State changes.

    def _set_up(self, session: OutSession) -> None:
        with self._outbound.lock:
            self._num_failures = 0
            self.attempts["up"] += 1
            self._session = session
            self._change("up", None)
            session.outbox.put(Ping(nonce=self.trip.ping(time.monotonic())))
            for leg in list(self._legs):
                self._open(session, leg)
            if self._is_closed:
                session.close()

    def _set_down(self, session: OutSession, reason: str) -> None:
        with self._outbound.lock:
            self._session = None
            self.trip = RoundTrip()
            self.rate.idle()
            if self._is_closed:
                return
            _log.warning("link to %s lost: %s", self.peer, reason)
            self._change("down", reason)
            self._outbound.lost(list(session.legs.values()), detail=reason)

    def _unreachable(self, error: TransportError | ProtocolError) -> None:
        reason = str(error)
        with self._outbound.lock:
            self._num_failures += 1
            self.attempts["untrusted" if isinstance(error, UntrustedPeerError) else "failed"] += 1
            is_news = self._state != "down" or self._num_failures == _BREAKER_FAILURES
            is_stalled_anew = self._state != "down"
            self._change("down", reason)
            if is_news:
                _log.warning(
                    "link to %s is down after %d attempts: %s", self.peer, self._num_failures, reason
                )
                self._report()
            if is_stalled_anew:
                for leg in self._legs:
                    self._outbound.stalled(leg, detail=reason)

    def _incompatible(self, error: IncompatiblePeerError) -> None:
        with self._outbound.lock:
            self._num_failures += 1
            self.attempts["incompatible"] += 1
            if self._state != "incompatible":
                _log.error("link to %s: %s", self.peer, error)
            self._change("incompatible", str(error))
            for leg in list(self._legs):
                self._outbound.stop_leg(leg, reason="incompatible", detail=str(error))

    def _open(self, session: OutSession, leg: Leg) -> None:
        number = session.num_opened
        session.num_opened += 1
        session.legs[number] = leg
        self._outbound.opened(leg, number)

    def _change(self, state: str, reason: str | None) -> None:
        if (state, reason) != (self._state, self._reason):
            self._state, self._reason = state, reason
            self._report()

    def _report(self) -> None:
        if self._is_closed:
            return  # an attempt that ends late must not speak for the link that the peer may have by now
        described = self.describe()
        self._reported_s, self._reported_bytes = time.monotonic(), described["queued_bytes"]
        self._events.emit("link", described)

    def _queued_bytes(self) -> int:
        return sum(leg.machine.outstanding_bytes for leg in self._legs)

    def _check_stall(self, leg: Leg, session: OutSession | None, now_s: float) -> None:
        timeout_s = self._settings.stall_timeout_s
        if leg.machine.state is tx.State.PARKED:
            if now_s - leg.progress_s > timeout_s:
                self._outbound.stop_leg(leg, reason="peer_down", detail=self._reason or "not connected")
            return
        waits = leg.machine.outstanding_bytes > 0 or leg.machine.state is tx.State.ENDED
        # A transfer that waits for others to cross first is not stalled: the link moves.
        moved_s = max(leg.progress_s, session.moved_s if session is not None else 0.0)
        if waits and now_s - moved_s > timeout_s:
            self._outbound.stop_leg(leg, reason="stalled", detail=f"no progress for {timeout_s:g} s")

    def _ping(self, session: OutSession, now_s: float) -> None:
        asked_s = self.trip.oldest_unanswered_s
        silence_s = 0.0 if asked_s is None else now_s - max(asked_s, session.heard_s)
        if silence_s > self._settings.silence_limit_s:
            session.close(f"{self.peer} has not answered for {silence_s:.0f} s")
        elif silence_s > self._settings.silence_limit_s / 2 and not session.is_silent:
            session.is_silent = True
            for leg in self._legs:
                self._outbound.stalled(leg, detail=f"{self.peer} does not answer")
        session.outbox.put(Ping(nonce=self.trip.ping(now_s)))
