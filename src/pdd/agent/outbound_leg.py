"""One transfer to one peer: its machine hears what happens, and what it asks for is done.

Everything here is called under the sending side's lock (``Outbound.lock``).
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pdd.agent.answers import Answers
from pdd.agent.events import EventLog
from pdd.agent.send_queue import Piece
from pdd.policy.unasked import Position
from pdd.wire import sender as tx
from pdd.wire.frames import encode_control

if TYPE_CHECKING:
    from pdd.agent.outbound import OutboundTransfer
    from pdd.agent.outbound_session import OutboundSession
    from pdd.agent.peer import PeerLink

_PROGRESS_PERIOD_S: Final = 0.25


@dataclass(slots=True, eq=False, kw_only=True)
class Leg:
    """One transfer to one peer."""

    transfer: "OutboundTransfer"
    peer: str
    link: "PeerLink | None"
    """None if no peer has that name; such a leg only fails."""
    machine: tx.Sender
    events: EventLog
    on_ended: Callable[["OutboundTransfer", str], None]
    """Called once, with the outcome: ``landed`` or why not."""
    session: "OutboundSession | None" = None
    """Where it is open now."""
    is_held: bool = False
    """Nothing is offered before ``resume``: the receiver reserves nothing for it."""
    wan_bytes: int = 0
    payload_bytes: int = 0
    _payload_bytes_at_completion: int = 0
    _progress_s: float = field(default_factory=time.monotonic)
    _reported_s: float = field(default_factory=time.monotonic)

    # What the sending side asks of it.

    def grow(self, first: int) -> None:
        """The chunks from ``first`` on are offered, and go out at once if the peer surely lacks them."""
        keys = self.transfer.keys
        self._step(tx.Grown(keys=tuple(keys[first:])))
        self._send_unasked(first)
        if len(keys) == self.transfer.num_expected:
            self._payload_bytes_at_completion = self.payload_bytes
            self._step(tx.Completed())

    def land_empty(self) -> None:
        """It has landed: a prompt below one chunk leaves nothing to tell the peer."""
        self.machine.state = tx.State.LANDED
        self._land()

    def resume(self) -> bool:
        """It is not held; whether it was."""
        if not self.is_held or self.link is None:
            return False
        self.is_held = False
        self._progress_s = time.monotonic()
        self.link.attach(self)
        return True

    def stop(self, *, reason: str, detail: str = "") -> None:
        """It has failed, if it had not ended."""
        self.is_held = False
        self._step(tx.Stop(reason=reason, detail=detail))

    def describe(self) -> dict[str, Any]:
        """Its state for the control API."""
        state = "held" if self.is_held else self.machine.state.name.lower()
        return {"state": state, "wan_bytes": self.wan_bytes, **self._progress()}

    # What the link and its session tell it.

    def opened(self, session: "OutboundSession", number: int) -> None:
        """The session carries it, where ``number`` stands for it."""
        self.session = session
        self._progress_s = time.monotonic()
        self._step(tx.Opened(number=number))

    def lost(self, *, detail: str) -> None:
        """Its session is gone; it waits for the next."""
        self._progress_s = time.monotonic()
        self._step(tx.ConnectionLost())
        self.session = None
        self.stalled(detail=detail)

    def stalled(self, *, detail: str) -> None:
        """The router knows that it does not move now."""
        self._emit("stalled", {"detail": detail})

    def received(self, event: tx.Event, *, num_bytes: int) -> None:
        """The peer's frame has taken effect.

        Raises:
            RemoteProtocolError: If the peer must not send it now.
        """
        self.wan_bytes += num_bytes
        self._progress_s = time.monotonic()
        first_answered, unasked = self.machine.num_answered, self.machine.unasked
        self._step(event)
        match event:
            case tx.WantSeen() if self.machine.is_active:
                self._learn(range(first_answered, self.machine.num_answered), unasked)
            case tx.AckSeen(indices=indices):
                self._acknowledged(indices)

    def sent(self, *, wan_bytes: int, payload_bytes: int) -> None:
        """A piece of it went out."""
        self.wan_bytes += wan_bytes
        self.payload_bytes += payload_bytes

    def check_progress(self, now_s: float, *, timeout_s: float, link_reason: str | None) -> None:
        """It has failed, if it has not moved for so long although it could have."""
        if self.machine.state is tx.State.PARKED:
            if now_s - self._progress_s > timeout_s:
                self.stop(reason="peer_down", detail=link_reason or "not connected")
            return
        waits = self.machine.outstanding_bytes > 0 or self.machine.state is tx.State.ENDED
        # A transfer that waits for others to cross first is not stalled: the link moves.
        moved_s = max(self._progress_s, self.session.moved_s if self.session is not None else 0.0)
        if waits and now_s - moved_s > timeout_s:
            self.stop(reason="stalled", detail=f"no progress for {timeout_s:g} s")

    # What the machine asks for.

    def _step(self, event: tx.Event) -> None:
        for effect in self.machine.step(event):
            match effect:
                case tx.Land():
                    self._land()
                case tx.Fail(reason=reason, detail=detail):
                    self._emit("failed", {"reason": reason, "detail": detail, "wan_bytes": self.wan_bytes})
                    self._ended(reason)
                case _:
                    assert self.session is not None  # a machine asks for these only where it is open
                    self._carry(self.session, effect)
        if not self.machine.is_active:
            self.session = None  # only now: a CANCEL may follow what ended it

    def _carry(self, session: "OutboundSession", effect: tx.Effect) -> None:
        match effect:
            case tx.Send(frame=frame):
                self.wan_bytes += len(encode_control(frame))
                session.outbox.put(frame)
            case tx.Enqueue(pieces=pieces, is_unasked=is_unasked):
                session.link.rate.busy(time.monotonic())
                queued = [self._piece(*piece, is_unasked=is_unasked) for piece in pieces]
                session.queue.put(queued, rank=self.transfer.rank, urgency=self.transfer.urgency)
            case tx.Withdraw(indices=indices):
                session.queue.discard_chunks(self.machine.number, frozenset(indices))
            case tx.Unqueue():
                session.queue.discard(self.machine.number)

    def _piece(self, index: int, offset: int, length: int, *, is_unasked: bool) -> Piece:
        return Piece(
            number=self.machine.number,
            key=self.machine.keys[index],
            index=index,
            offset=offset,
            length=length,
            is_unasked=is_unasked,
        )

    def _land(self) -> None:
        transfer, num_bytes = self.transfer, self.payload_bytes
        early_bytes = self._payload_bytes_at_completion
        fields = {
            "chunks": transfer.num_expected,
            "chunks_sent": self.machine.num_crossed,
            "wan_bytes": self.wan_bytes,
            "payload_bytes": num_bytes,
            "full_bytes": transfer.num_expected * self.machine.chunk_bytes,
            "tokens": transfer.num_tokens,
            "elapsed_s": round(time.monotonic() - transfer.begun_s, 6),
            "prefill_overlap_ratio": round(early_bytes / num_bytes, 4) if num_bytes else 0.0,
        }
        self._emit("landed", fields)
        self._ended("landed")

    def _ended(self, outcome: str) -> None:
        if self.session is not None:
            self.session.forget(self)
        if self.link is not None:
            self.link.detach(self)
        self.on_ended(self.transfer, outcome)

    def _emit(self, event: str, fields: dict[str, Any]) -> None:
        self.events.emit(event, {"transfer": self.transfer.id, "peer": self.peer, **fields})

    def _progress(self) -> dict[str, Any]:
        return {
            "transfer": self.transfer.id,
            "peer": self.peer,
            "bytes_sent": self.payload_bytes,
            "chunks_done": self.machine.num_crossed,
            "chunks_offered": len(self.transfer.keys),
        }

    # What the peer is known, or taken, to have.

    def _send_unasked(self, first: int) -> None:
        """The chunks from ``first`` on that the peer almost surely lacks go out behind their offer."""
        if self.session is None or self.machine.state is not tx.State.OPEN:
            return
        keys = self.machine.keys
        last = min(len(keys), first + self.session.num_unasked_chunks())
        position = self._position(first)
        chosen: list[int] = []
        for index in range(first, last):
            if position is None or not self._answers.is_surely_lacking(keys[index], position):
                break
            chosen.append(index)
            self._answers.remember(keys[index])
            position = Position.AFTER_LACKING
        if chosen:
            self._step(tx.SendUnasked(indices=tuple(chosen)))

    def _learn(self, answered: range, unasked: Collection[int]) -> None:
        """What the peer said of these chunks, some of them sent unasked, is known for the next ones."""
        for index in answered:
            is_lacking = self.machine.peer_lacks(index) is True
            key, position = self.machine.keys[index], self._position(index)
            self._answers.learn(key, position, is_lacking=is_lacking, was_unasked=index in unasked)
            if index in unasked:
                self._answers.count(self.machine.chunk_bytes, is_lacking=is_lacking)

    def _acknowledged(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._answers.remember(self.machine.keys[index])
        if self._progress_s - self._reported_s >= _PROGRESS_PERIOD_S:
            self._reported_s = self._progress_s
            self.events.emit("progress", self._progress())

    def _position(self, index: int) -> Position | None:
        """What stands in front of the chunk, as far as the peer has said or is taken to have."""
        if index == 0:
            return Position.FIRST
        is_lacking = self.machine.peer_lacks(index - 1)
        if is_lacking is None:
            return None
        return Position.AFTER_LACKING if is_lacking else Position.AFTER_HELD

    @property
    def _answers(self) -> Answers:
        assert self.link is not None  # asked for only of legs that a session carries
        return self.link.answers
