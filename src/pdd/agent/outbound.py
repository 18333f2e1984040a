"""The sending side: transfers ordered by the engine's requests, one leg per target.

One lock guards it. The store's lock, queues and outboxes may be taken under it, never the reverse, and
nothing is sent or received while it is held.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pdd.agent.answers import Answers
from pdd.agent.events import EventLog
from pdd.agent.send_queue import Piece, Urgency
from pdd.agent.store import ChunkStore
from pdd.policy.unasked import Position
from pdd.wire import sender as tx
from pdd.wire.frames import Cancel, ControlFrame, End, Offer, encode_control

_log = logging.getLogger(__name__)
_HISTORY: Final = 1024
"""Ended transfers, and cancels that came before their transfer, that are remembered."""
_PROGRESS_PERIOD_S: Final = 0.25


class Link(Protocol):
    """The way to one peer, as this module needs it."""

    peer: str
    is_wan: bool
    answers: Answers

    def attach(self, leg: "Leg") -> None:
        """The leg is carried by the link from now on."""

    def detach(self, leg: "Leg") -> None:
        """The leg has ended."""

    def send(self, frame: ControlFrame) -> None:
        """The frame is queued on the session, if there is one."""

    def enqueue(self, leg: "Leg", pieces: Sequence[Piece]) -> None:
        """The pieces are queued behind what the order puts first."""

    def num_unasked_chunks(self) -> int:
        """How many chunks may go out now before the peer has said that it lacks them."""

    def withdraw(self, leg: "Leg", indices: Sequence[int]) -> None:
        """No piece of these chunks of the leg is queued."""

    def unqueue(self, leg: "Leg") -> None:
        """No piece of the leg is queued."""


@dataclass(slots=True, eq=False)
class Leg:
    """One transfer to one peer."""

    transfer: "OutgoingTransfer"
    peer: str
    machine: tx.Sender
    link: Link | None
    wan_bytes: int = 0
    payload_bytes: int = 0
    payload_bytes_at_completion: int | None = None
    is_held: bool = False
    """Nothing is offered before ``resume``: the receiver reserves nothing for it."""
    progress_s: float = 0.0
    reported_s: float = 0.0


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """The KV of one prompt on its way to its targets."""

    transfer: str
    request: str
    rank: int
    num_expected: int
    num_tokens: int
    """Of the prompt that all chunks together hold."""
    begun_s: float
    urgency: Urgency
    keys: list[bytes] = field(default_factory=list)
    early: dict[int, bytes] = field(default_factory=dict)
    """Chunks seen before the ones in front of them."""
    leased: list[bytes] = field(default_factory=list)
    legs: dict[str, Leg] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """Whether any leg can still land."""
        return any(leg.machine.is_active for leg in self.legs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk of a request that is in the store now, leased by the caller for the length of the call."""

    key: bytes
    end_tokens: int


class Outbound:
    """All that this agent pushes to peers."""

    def __init__(
        self,
        store: ChunkStore,
        events: EventLog,
        links: Mapping[str, Link],
        *,
        chunk_tokens: int,
        piece_bytes: int,
    ) -> None:
        self.lock = threading.RLock()
        self._store = store
        self._events = events
        self._links = links
        self._chunk_tokens = chunk_tokens
        self._piece_bytes = piece_bytes
        self._transfers: OrderedDict[str, OutgoingTransfer] = OrderedDict()
        self._by_request: dict[str, OutgoingTransfer] = {}
        self._early_cancels: OrderedDict[str, frozenset[str] | None] = OrderedDict()
        self._early_resumes: OrderedDict[str, None] = OrderedDict()
        self._num_begun = 0
        self.ended: dict[str, int] = {}
        """Legs ended, by outcome (``landed`` or the reason), for metrics."""

    def begin(
        self,
        *,
        request: str,
        transfer: str,
        targets: Sequence[str],
        prompt_tokens: int,
        urgency: Urgency,
        num_chunks: int | None = None,
    ) -> None:
        """Chunks of the request go to the targets from now on; if held, to other sites only after resume.

        ``num_chunks`` is how many there are, if not one for each ``chunk_tokens`` of the prompt.
        """
        with self.lock:
            known = self._transfers.get(transfer)
            if known is not None and known.is_active:
                _log.warning("transfer %s was ordered again while it is open; ignored", transfer)
                return
            self._num_begun += 1
            outgoing = OutgoingTransfer(
                transfer=transfer,
                request=request,
                rank=self._num_begun,
                num_expected=prompt_tokens // self._chunk_tokens if num_chunks is None else num_chunks,
                num_tokens=prompt_tokens // self._chunk_tokens * self._chunk_tokens,
                begun_s=time.monotonic(),
                urgency=urgency,
            )
            self._transfers[transfer] = outgoing
            self._transfers.move_to_end(transfer)
            self._by_request[request] = outgoing
            for target in dict.fromkeys(targets):
                self._begin_leg(outgoing, target)
            self._trim()

    def stored(self, request: str, chunks: Sequence[StoredChunk]) -> None:
        """The chunks are offered to the request's targets, in prefix order as far as it is closed."""
        with self.lock:
            outgoing = self._by_request.get(request)
            if outgoing is None or not outgoing.is_active:
                return
            for chunk in chunks:
                index = chunk.end_tokens // self._chunk_tokens - 1
                is_ours = 0 <= index < outgoing.num_expected and index >= len(outgoing.keys)
                if is_ours and index not in outgoing.early and self._store.lease(chunk.key):
                    outgoing.leased.append(chunk.key)
                    outgoing.early[index] = chunk.key
            grown: list[bytes] = []
            while (key := outgoing.early.pop(len(outgoing.keys), None)) is not None:
                outgoing.keys.append(key)
                grown.append(key)
            if grown:
                self._grow(outgoing, tuple(grown))

    def not_stored(self, request: str) -> None:
        """A chunk of the request found no room in the store: its transfer cannot become whole."""
        counts = self._store.counts()
        detail = f"no room at the sender: {counts.leased} of {counts.slots} slots are leased"
        with self.lock:
            outgoing = self._by_request.get(request)
            if outgoing is not None:
                self._stop(outgoing, None, tx.Stop(reason="store_full", detail=detail))

    def finished(self, request: str) -> None:
        """No more chunks come for the request; a transfer that lacks some has failed."""
        with self.lock:
            outgoing = self._by_request.pop(request, None)
            if outgoing is None or len(outgoing.keys) == outgoing.num_expected:
                return
            detail = f"{len(outgoing.keys)} of {outgoing.num_expected} chunks were seen by the request's end"
            self._stop(outgoing, None, tx.Stop(reason="prefill_incomplete", detail=detail))

    def cancel(self, transfer: str, peers: Sequence[str] | None) -> list[str]:
        """The named legs, or all, are cancelled; returns which were open. Remembered if it came early."""
        with self.lock:
            outgoing = self._transfers.get(transfer)
            if outgoing is None:
                self._early_cancels[transfer] = None if peers is None else frozenset(peers)
                while len(self._early_cancels) > _HISTORY:
                    self._early_cancels.popitem(last=False)
                return [] if peers is None else list(peers)
            return self._stop(outgoing, peers, tx.Stop(reason="cancelled"))

    def resume(self, transfer: str) -> list[str]:
        """No leg of the transfer is held; returns which were. Remembered if it came before the order."""
        with self.lock:
            outgoing = self._transfers.get(transfer)
            if outgoing is None:
                self._early_resumes[transfer] = None
                while len(self._early_resumes) > _HISTORY:
                    self._early_resumes.popitem(last=False)
                return []
            return [leg.peer for leg in outgoing.legs.values() if self._resume(leg)]

    def end_old_holds(self, now_s: float, *, limit_s: float) -> None:
        """Legs held for longer go on: a router that died must not keep the sender's chunks for ever."""
        with self.lock:
            for outgoing in self._transfers.values():
                if outgoing.urgency.is_held and now_s - outgoing.begun_s > limit_s:
                    for leg in outgoing.legs.values():
                        if self._resume(leg):
                            _log.warning(
                                "transfer %s was held for %g s; it goes on", outgoing.transfer, limit_s
                            )

    def _resume(self, leg: Leg) -> bool:
        if not leg.is_held or not leg.machine.is_active or leg.link is None:
            return False
        leg.is_held = False
        leg.progress_s = time.monotonic()
        leg.link.attach(leg)
        return True

    def opened(self, leg: Leg, number: int) -> None:
        """The leg's link has a session, in which ``number`` stands for it."""
        with self.lock:
            if leg.machine.is_active:
                leg.progress_s = time.monotonic()
                self._step(leg, tx.Opened(number=number))

    def lost(self, legs: Sequence[Leg], *, detail: str) -> None:
        """The session of these legs is gone; they wait for the next."""
        with self.lock:
            for leg in legs:
                if leg.machine.state in (tx.State.OPEN, tx.State.ENDED):
                    leg.progress_s = time.monotonic()
                    self._step(leg, tx.ConnectionLost())
                    self.stalled(leg, detail=detail)

    def stalled(self, leg: Leg, *, detail: str) -> None:
        """The router knows that the leg does not move now."""
        fields = {"transfer": leg.transfer.transfer, "peer": leg.peer, "detail": detail}
        self._events.emit("stalled", fields)

    def drop_link(self, link: Link, *, detail: str) -> None:
        """Every leg over the link, held ones too, has failed."""
        with self.lock:
            for outgoing in list(self._transfers.values()):
                for leg in outgoing.legs.values():
                    if leg.link is link and leg.machine.is_active:
                        self._step(leg, tx.Stop(reason="peer_down", detail=detail))

    def stop_leg(self, leg: Leg, *, reason: str, detail: str) -> None:
        """The leg has failed, if it had not ended."""
        with self.lock:
            self._step(leg, tx.Stop(reason=reason, detail=detail))

    def received(self, leg: Leg, event: tx.Event, *, num_bytes: int) -> None:
        """The peer's frame has taken effect.

        Raises:
            RemoteProtocolError: If the peer must not send it now.
        """
        with self.lock:
            leg.wan_bytes += num_bytes
            leg.progress_s = time.monotonic()
            first_answered, unasked = leg.machine.num_answered, leg.machine.unasked
            self._step(leg, event)
            if isinstance(event, tx.WantSeen) and leg.machine.is_active:
                self._learn(leg, range(first_answered, leg.machine.num_answered), unasked)
            if isinstance(event, tx.AckSeen) and leg.link is not None:
                for index in event.indices:
                    leg.link.answers.remember(leg.machine.keys[index])
            if isinstance(event, tx.AckSeen) and leg.progress_s - leg.reported_s >= _PROGRESS_PERIOD_S:
                leg.reported_s = leg.progress_s
                self._events.emit("progress", _progress(leg))

    def sent(self, leg: Leg, *, wan_bytes: int, payload_bytes: int) -> None:
        """A piece of the leg went out."""
        with self.lock:
            leg.wan_bytes += wan_bytes
            leg.payload_bytes += payload_bytes

    def describe(self, transfer: str) -> dict[str, object] | None:
        """The sender's view of a transfer for the control API, if it is known here."""
        with self.lock:
            outgoing = self._transfers.get(transfer)
            if outgoing is None:
                return None
            return {
                leg.peer: {
                    "state": "held" if leg.is_held else leg.machine.state.name.lower(),
                    "wan_bytes": leg.wan_bytes,
                    **_progress(leg),
                }
                for leg in outgoing.legs.values()
            }

    def num_transfers(self) -> int:
        """Open transfers."""
        with self.lock:
            return sum(outgoing.is_active for outgoing in self._transfers.values())

    def close(self, *, reason: str, detail: str) -> None:
        """Every open leg has failed."""
        with self.lock:
            for outgoing in self._transfers.values():
                self._stop(outgoing, None, tx.Stop(reason=reason, detail=detail))

    def _begin_leg(self, outgoing: OutgoingTransfer, peer: str) -> None:
        link = self._links.get(peer)
        machine = tx.Sender(
            transfer=outgoing.transfer, chunk_bytes=self._store.chunk_bytes, piece_bytes=self._piece_bytes
        )
        now_s = time.monotonic()
        leg = Leg(
            transfer=outgoing, peer=peer, machine=machine, link=link, progress_s=now_s, reported_s=now_s
        )
        outgoing.legs[peer] = leg
        cancelled = self._early_cancels.get(outgoing.transfer, frozenset())
        if cancelled is None or peer in cancelled:
            self._step(leg, tx.Stop(reason="cancelled", detail="before it began"))
        elif link is None:
            self._step(leg, tx.Stop(reason="unknown_peer", detail=f"no other engine is called {peer!r}"))
        elif outgoing.num_expected == 0:
            leg.machine.state = tx.State.LANDED  # a prompt below one chunk: there is nothing to tell the peer
            self._land(leg)
        elif outgoing.urgency.is_held and link.is_wan and outgoing.transfer not in self._early_resumes:
            leg.is_held = True
        else:
            link.attach(leg)

    def _grow(self, outgoing: OutgoingTransfer, keys: tuple[bytes, ...]) -> None:
        is_complete = len(outgoing.keys) == outgoing.num_expected
        for leg in outgoing.legs.values():
            self._step(leg, tx.Grown(keys=keys))
            self._send_unasked(leg, first=len(outgoing.keys) - len(keys))
            if is_complete:
                leg.payload_bytes_at_completion = leg.payload_bytes
                self._step(leg, tx.Completed())

    def _send_unasked(self, leg: Leg, *, first: int) -> None:
        """The chunks from ``first`` on that the peer almost surely lacks go out behind their offer."""
        if leg.link is None or leg.machine.state is not tx.State.OPEN:
            return
        keys, answers = leg.machine.keys, leg.link.answers
        last = min(len(keys), first + leg.link.num_unasked_chunks())
        position = _position(leg, first)
        chosen: list[int] = []
        for index in range(first, last):
            if position is None or not answers.is_surely_lacking(keys[index], position):
                break
            chosen.append(index)
            position = Position.AFTER_LACKING
        if chosen:
            self._step(leg, tx.SendUnasked(indices=tuple(chosen)))

    def _learn(self, leg: Leg, answered: range, unasked: Collection[int]) -> None:
        """What the peer said of these chunks, some of them sent unasked, is known for the next ones."""
        if leg.link is None:
            return
        for index in answered:
            is_lacking = leg.machine.peer_lacks(index) is True
            leg.link.answers.learn(leg.machine.keys[index], _position(leg, index), is_lacking=is_lacking)
            if index in unasked:
                leg.link.answers.count(self._store.chunk_bytes, is_lacking=is_lacking)

    def _stop(self, outgoing: OutgoingTransfer, peers: Sequence[str] | None, event: tx.Stop) -> list[str]:
        legs = [leg for leg in outgoing.legs.values() if peers is None or leg.peer in peers]
        stopped = [leg for leg in legs if leg.machine.is_active]
        for leg in stopped:
            self._step(leg, event)
        return [leg.peer for leg in stopped]

    def _step(self, leg: Leg, event: tx.Event) -> None:
        leg.is_held = leg.is_held and not isinstance(event, tx.Stop)
        for effect in leg.machine.step(event):
            self._apply(leg, effect)

    def _apply(self, leg: Leg, effect: tx.Effect) -> None:
        match effect:
            case tx.Send(frame=frame):
                self._send(leg, frame)
            case tx.Enqueue():
                self._enqueue(leg, effect)
            case tx.Withdraw(indices=indices):
                if leg.link is not None:
                    leg.link.withdraw(leg, indices)
            case tx.Unqueue():
                if leg.link is not None:
                    leg.link.unqueue(leg)
            case tx.Land():
                self._land(leg)
            case tx.Fail(reason=reason, detail=detail):
                self._fail(leg, reason, detail)

    def _enqueue(self, leg: Leg, effect: tx.Enqueue) -> None:
        assert leg.link is not None
        keys, number = leg.machine.keys, leg.machine.number
        leg.link.enqueue(
            leg,
            [
                Piece(
                    number=number,
                    key=keys[index],
                    index=index,
                    offset=offset,
                    length=length,
                    is_unasked=effect.is_unasked,
                )
                for index, offset, length in effect.pieces
            ],
        )

    def _send(self, leg: Leg, frame: Offer | End | Cancel) -> None:
        assert leg.link is not None
        leg.wan_bytes += len(encode_control(frame))
        leg.link.send(frame)

    def _land(self, leg: Leg) -> None:
        outgoing = leg.transfer
        num_chunks = outgoing.num_expected
        early = leg.payload_bytes_at_completion or 0
        self._events.emit(
            "landed",
            {
                "transfer": outgoing.transfer,
                "peer": leg.peer,
                "chunks": num_chunks,
                "chunks_sent": leg.machine.num_crossed,
                "wan_bytes": leg.wan_bytes,
                "payload_bytes": leg.payload_bytes,
                "full_bytes": num_chunks * self._store.chunk_bytes,
                "tokens": outgoing.num_tokens,
                "elapsed_s": round(time.monotonic() - outgoing.begun_s, 6),
                "prefill_overlap_ratio": round(early / leg.payload_bytes, 4) if leg.payload_bytes else 0.0,
            },
        )
        self._ended(leg, "landed")

    def _fail(self, leg: Leg, reason: str, detail: str) -> None:
        fields = {
            "transfer": leg.transfer.transfer,
            "peer": leg.peer,
            "reason": reason,
            "detail": detail,
            "wan_bytes": leg.wan_bytes,
        }
        self._events.emit("failed", fields)
        self._ended(leg, reason)

    def _ended(self, leg: Leg, outcome: str) -> None:
        self.ended[outcome] = self.ended.get(outcome, 0) + 1
        if leg.link is not None:
            leg.link.detach(leg)
        outgoing = leg.transfer
        is_last = not any(other.machine.is_active for other in outgoing.legs.values() if other is not leg)
        if is_last:
            leased, outgoing.leased = outgoing.leased, []
            self._store.release(leased)

    def _trim(self) -> None:
        while len(self._transfers) > _HISTORY:
            oldest = next((t for t, outgoing in self._transfers.items() if not outgoing.is_active), None)
            if oldest is None:
                return
            del self._transfers[oldest]


def _position(leg: Leg, index: int) -> Position | None:
    """What stands in front of the chunk, as far as the peer has said or is taken to have."""
    if index == 0:
        return Position.FIRST
    is_lacking = leg.machine.peer_lacks(index - 1)
    if is_lacking is None:
        return None
    return Position.AFTER_LACKING if is_lacking else Position.AFTER_HELD


def _progress(leg: Leg) -> dict[str, Any]:
    return {
        "transfer": leg.transfer.transfer,
        "peer": leg.peer,
        "bytes_sent": leg.payload_bytes,
        "chunks_done": leg.machine.num_crossed,
        "chunks_offered": len(leg.transfer.keys),
    }
