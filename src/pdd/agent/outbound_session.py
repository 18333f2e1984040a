"""The connections to one peer that belong together, and the legs open on them.

Reads the control connection and hands what it says to the legs; what becomes of the link is the link's.
"""

import threading
import time
from typing import TYPE_CHECKING, Final

from pdd.agent.connection import Identity, read_control
from pdd.agent.outbound_leg import Leg
from pdd.agent.outbox import ControlOutbox
from pdd.agent.send_queue import Piece, SendQueue
from pdd.agent.stats import RoundTrip
from pdd.core.errors import ConnectionLostError, PddError, ProtocolError, RemoteProtocolError, TransportError
from pdd.policy.unasked import UnaskedSnapshot, decide_unasked
from pdd.transport.base import Stream
from pdd.wire import sender as tx
from pdd.wire.decoder import FrameDecoder
from pdd.wire.frames import Ack, ControlFrame, Failed, HelloOk, Landed, Ping, Pong, Want

if TYPE_CHECKING:
    from pdd.agent.peer import PeerLink

_SILENT_S: Final = 3.0
"""A peer with open transfers that says nothing for so long is reported; pings ask it every second."""


class OutboundSession:
    """See the module."""

    def __init__(self, link: "PeerLink", identity: Identity, control: Stream, *, accepted: HelloOk) -> None:
        self.link = link
        self.identity = identity
        self.accepted = accepted
        self.outbox = ControlOutbox(control, name=f"pdd-out-{link.peer}")
        self.queue = SendQueue()
        self.legs: dict[int, Leg] = {}
        """By the number that stands for each; guarded by the link's lock."""
        self.trip = RoundTrip()
        self.moved_s = time.monotonic()
        self._control = control
        self._num_opened = 0
        self._heard_s = time.monotonic()
        self._is_silent = False
        self._reason = ""
        self._lock = threading.Lock()
        self._streams: list[Stream] = [control]
        self._num_failed = 0
        self._is_closed = False

    # For the link, under its lock.

    def open(self, leg: Leg) -> None:
        """The leg has a number here, and offers what it has."""
        number = self._num_opened
        self._num_opened += 1
        self.legs[number] = leg
        leg.opened(self, number)

    def ping(self, now_s: float) -> None:
        """The peer is asked whether it is there; one that has not answered for too long is given up."""
        asked_s = self.trip.oldest_unanswered_s
        silence_s = 0.0 if asked_s is None else now_s - max(asked_s, self._heard_s)
        limit_s = _silence_limit_s(self.link.settings.stall_timeout_s)
        if silence_s > limit_s:
            self.close(f"{self.link.peer} has not answered for {silence_s:.0f} s")
        elif silence_s > limit_s / 2 and not self._is_silent:
            self._is_silent = True
            for leg in self.legs.values():
                leg.stalled(detail=f"{self.link.peer} does not answer")
        self.outbox.put(Ping(nonce=self.trip.ping(now_s)))

    # For the legs, under the link's lock.

    def forget(self, leg: Leg) -> None:
        """The leg has ended: late frames for it are dropped."""
        del self.legs[leg.machine.number]

    def num_unasked_chunks(self) -> int:
        """How many chunks may go out now before the peer has said that it lacks them."""
        legs = self.legs.values()
        snapshot = UnaskedSnapshot(
            rtt_s=self.trip.rtt_s,
            rate_bytes_per_s=self.link.rate.rate_bytes_per_s,
            outstanding_bytes=sum(leg.machine.outstanding_bytes for leg in legs),
            unasked_bytes=sum(leg.machine.unasked_bytes for leg in legs),
            credit_bytes=min(self.accepted.unasked_bytes, self.link.settings.unasked_bytes),
            chunk_bytes=self.link.store.chunk_bytes,
        )
        return decide_unasked(snapshot, self.link.answers.params).num_chunks

    # For the threads of its connections.

    def serve(self, decoder: FrameDecoder) -> str:
        """The control connection has ended, and with it the session; returns why."""
        try:
            for event in read_control(self._control, decoder):
                self._heard_s = time.monotonic()
                self._on_frame(event.frame, event.num_bytes)
        except (ProtocolError, TransportError) as error:
            return self._reason or str(error)
        finally:
            self.close()
        return self._reason or f"{self.link.peer} closed the connection"

    def add_stream(self, stream: Stream) -> None:
        """The stream is closed with the session.

        Raises:
            ConnectionLostError: If the session is closed already.
        """
        with self._lock:
            if not self._is_closed:
                self._streams.append(stream)
                return
        stream.close()
        raise ConnectionLostError("the session is closed")

    def stream_failed(self, error: PddError) -> None:
        """A data stream did not come about; if none is left to be hoped for, the session is closed."""
        with self._lock:
            self._num_failed += 1
            is_last = self._num_failed >= self.link.settings.streams
        if is_last:
            self.close(f"no data stream to {self.link.peer}: {error}")

    def sent(self, piece: Piece, *, wan_bytes: int) -> None:
        """The piece goes out now, in so many bytes; its transfer may have ended."""
        with self.link.lock:
            self.link.sent(wan_bytes)
            leg = self.legs.get(piece.number)
            if leg is not None:
                leg.sent(wan_bytes=wan_bytes, payload_bytes=piece.length)

    def moved(self) -> None:
        """Bytes have moved just now."""
        self.moved_s = time.monotonic()

    # For anyone.

    def segments(self) -> tuple[int, int]:
        """Data segments sent on all connections, and how many of them were sent again."""
        with self._lock:
            counts = [stream.segments() or (0, 0) for stream in self._streams]
        return sum(sent for sent, _ in counts), sum(again for _, again in counts)

    def close(self, reason: str = "") -> None:
        """All connections are closed; the first reason given is kept."""
        with self._lock:
            self._reason = self._reason or reason
            if self._is_closed:
                return
            self._is_closed = True
            streams = list(self._streams)
        self.queue.close()
        self.outbox.close()
        for stream in streams:
            stream.close()

    def _on_frame(self, frame: ControlFrame, num_bytes: int) -> None:
        match frame:
            case Pong(nonce=nonce):
                self.trip.pong(nonce, time.monotonic())
                self._is_silent = False
            case Want(number=number, indices=indices, pieces=pieces, answered=answered):
                want = tx.WantSeen(indices=indices, pieces=pieces, answered=answered)
                self._on_leg(number, want, num_bytes)
                self._acknowledged(0)  # what was sent in vain is no longer awaited
            case Ack(number=number, indices=indices):
                self._on_leg(number, tx.AckSeen(indices=indices), num_bytes)
                self._acknowledged(len(indices) * self.link.store.chunk_bytes)
            case Landed(number=number):
                self._on_leg(number, tx.LandedSeen(), num_bytes)
            case Failed(number=number, reason=reason, detail=detail):
                self._on_leg(number, tx.FailedSeen(reason=reason, detail=detail), num_bytes)
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} from the receiving side")

    def _on_leg(self, number: int, event: tx.Event, num_bytes: int) -> None:
        with self.link.lock:
            leg = self.legs.get(number)
            if leg is not None:
                leg.received(event, num_bytes=num_bytes)
            elif number >= self._num_opened:
                raise RemoteProtocolError(f"transfer {number} was never offered")

    def _acknowledged(self, num_bytes: int) -> None:
        self.moved()
        self.link.acknowledged(num_bytes)


def _silence_limit_s(stall_timeout_s: float) -> float:
    """How long a peer with open transfers may say nothing before its session is given up.

    Well below the stall timeout: an idle flow that a middlebox forgot is replaced in time.
    """
    return min(stall_timeout_s, max(_SILENT_S, stall_timeout_s / 3))
