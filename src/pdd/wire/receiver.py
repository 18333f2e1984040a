"""One transfer as its receiver sees it: a table of (state, event) -> effects.

Knows indices, never keys or memory: whoever drives it looks offered keys up in the store and reports
where each chunk stands. Effects are to be carried out in order.

A chunk is HELD (visible here and leased for this transfer), LANDING (wanted, a slot is reserved, pieces
arrive) or ELSEWHERE (another transfer is landing it; it is not wanted twice).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, Final

from pdd.core.errors import InvariantError, LocalProtocolError, RemoteProtocolError
from pdd.wire.frames import MAX_CHUNKS, Ack, Failed, Want

MAX_CORRUPT_PIECES: Final = 3
"""Corrupt pieces forgiven per chunk: TCP hardly ever lets one through, so more is a fault."""
MAX_PIECES_PER_CHUNK: Final = 4096


class State(Enum):
    """Where the transfer stands."""

    OPEN = auto()
    ENDED = auto()
    LANDED = auto()
    FAILED = auto()
    CANCELLED = auto()
    LOST = auto()


_ACTIVE: Final = (State.OPEN, State.ENDED)
_TERMINAL: Final = (State.LANDED, State.FAILED, State.CANCELLED, State.LOST)


class Placement(Enum):
    """Where one chunk stands."""

    HELD = auto()
    LANDING = auto()
    ELSEWHERE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """OFFER arrived, and its keys were looked up."""

    first: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceArrived:
    """A claimed piece has been received."""

    index: int
    offset: int
    intact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NowHeld:
    """The other transfer landed the chunk; it is leased for this one too."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NowOurs:
    """The other transfer died; a slot is reserved for this one now."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSeen:
    """END arrived."""

    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelSeen:
    """CANCEL arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """This side cannot or will not take the transfer any more."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    """The session ended."""


Event = Offered | PieceArrived | NowHeld | NowOurs | EndSeen | CancelSeen | GiveUp | ConnectionLost
_FROM_PEER = (Offered, PieceArrived, EndSeen, CancelSeen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send this frame."""

    frame: Want | Ack | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The chunk is whole and verified: make it visible, and lease it."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Give the reserved slots of these chunks back."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """All is held: tell the engine first, then send LANDED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLeases:
    """The leases of what is held end now, or run out by themselves if ``keep``."""

    keep: bool


Effect = Send | Commit | Abort | Announce | EndLeases


@dataclass(slots=True)
class _Chunk:
    placement: Placement
    takes_unasked: bool = False
    """It was landing when it was offered; else the sender sends it anew when it is asked to."""
    pieces: dict[int, int] = field(default_factory=dict)
    """offset -> length of what was claimed or is good."""
    good: set[int] = field(default_factory=set)
    good_bytes: int = 0
    num_corrupt: int = 0


class Receiver:
    """The receiving half of one transfer within one session."""

    def __init__(self, *, number: int, chunk_bytes: int) -> None:
        self.number = number
        self.state = State.OPEN
        self._chunk_bytes = chunk_bytes
        self._chunks: list[_Chunk] = []
        self._num_held = 0
        self._total: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether pieces may still arrive for it."""
        return self.state in _ACTIVE

    @property
    def num_offered(self) -> int:
        """Chunks offered so far."""
        return len(self._chunks)

    @property
    def num_held(self) -> int:
        """Chunks visible and leased."""
        return self._num_held

    def step(self, event: Event) -> list[Effect]:
        """The effects of an event.

        Raises:
            RemoteProtocolError: If the peer must not have caused the event now.
            LocalProtocolError: If this side must not have.
        """
        handler = self._TABLE.get((self.state, type(event)))
        if handler is None:
            kind = RemoteProtocolError if isinstance(event, _FROM_PEER) else LocalProtocolError
            raise kind(f"{type(event).__name__} in state {self.state.name}")
        return handler(self, event)

    def claim(self, *, index: int, offset: int, length: int, is_unasked: bool = False) -> bool:
        """Whether the piece is to be received into its slot; otherwise it is late, or of no use, and dropped.

        Raises:
            RemoteProtocolError: If the peer must not send this piece at all.
        """
        if not self.is_active:
            return False
        if index >= len(self._chunks) or offset + length > self._chunk_bytes:
            raise RemoteProtocolError(f"piece {index}+{offset}:{length} is outside of the transfer")
        chunk = self._chunks[index]
        if is_unasked and not chunk.takes_unasked:
            return False
        if chunk.placement is Placement.ELSEWHERE:
            raise RemoteProtocolError(f"chunk {index} was not wanted")
        if chunk.placement is Placement.HELD or chunk.pieces.get(offset) == length:
            return False
        if any(offset < start + size and start < offset + length for start, size in chunk.pieces.items()):
            raise RemoteProtocolError(f"piece {index}+{offset}:{length} overlaps another")
        if len(chunk.pieces) >= MAX_PIECES_PER_CHUNK:
            raise RemoteProtocolError(f"chunk {index} comes in more than {MAX_PIECES_PER_CHUNK} pieces")
        chunk.pieces[offset] = length
        return True

    def check_invariants(self) -> None:
        """Nothing, if the state is consistent.

        Raises:
            InvariantError: If not.
        """
        held = sum(chunk.placement is Placement.HELD for chunk in self._chunks)
        landing = [chunk for chunk in self._chunks if chunk.placement is Placement.LANDING]
        complete = self._total is not None and held == len(self._chunks) == self._total
        broken = [
            name
            for name, is_good in (
                ("num_held", held == self._num_held),
                ("landed means whole", self.state is not State.LANDED or complete),
                ("whole means landed", self.state is not State.ENDED or not complete),
                ("good is below whole", all(chunk.good_bytes < self._chunk_bytes for chunk in landing)),
                ("good is claimed", all(chunk.good <= chunk.pieces.keys() for chunk in landing)),
                (
                    "retries bounded",
                    all(chunk.num_corrupt <= MAX_CORRUPT_PIECES + 1 for chunk in self._chunks),
                ),
                ("not more than total", self._total is None or len(self._chunks) == self._total),
            )
            if not is_good
        ]
        if broken:
            raise InvariantError(
                f"receiver of transfer {self.number} in {self.state.name}: {', '.join(broken)}"
            )

    def _offered(self, event: Offered) -> list[Effect]:
        if event.first != len(self._chunks) or event.first + len(event.placements) > MAX_CHUNKS:
            raise RemoteProtocolError(
                f"offer starts at {event.first}, but {len(self._chunks)} chunks were offered"
            )
        self._chunks.extend(_Chunk(p, takes_unasked=p is Placement.LANDING) for p in event.placements)
        self._num_held += event.placements.count(Placement.HELD)
        lacking = [event.first + i for i, p in enumerate(event.placements) if p is Placement.LANDING]
        if not event.placements:
            return []
        return [Send(frame=Want(number=self.number, indices=lacking, answered=len(self._chunks)))]

    def _piece_arrived(self, event: PieceArrived) -> list[Effect]:
        chunk = self._chunks[event.index]
        length = chunk.pieces[event.offset]
        if not event.intact:
            return self._piece_corrupt(chunk, event, length)
        chunk.good.add(event.offset)
        chunk.good_bytes += length
        if chunk.good_bytes < self._chunk_bytes:
            return []
        self._hold(chunk)
        ack = Send(frame=Ack(number=self.number, indices=[event.index]))
        return [Commit(index=event.index), ack, *self._finish_if_whole()]

    def _piece_corrupt(self, chunk: _Chunk, event: PieceArrived, length: int) -> list[Effect]:
        del chunk.pieces[event.offset]
        chunk.num_corrupt += 1
        if chunk.num_corrupt > MAX_CORRUPT_PIECES:
            return self._give_up(
                GiveUp(reason="corrupt", detail=f"chunk {event.index} arrived corrupt too often")
            )
        return [
            Send(frame=Want(number=self.number, indices=[], pieces=[(event.index, event.offset, length)]))
        ]

    def _now_held(self, event: NowHeld) -> list[Effect]:
        self._hold(self._elsewhere(event.index))
        return self._finish_if_whole()

    def _now_ours(self, event: NowOurs) -> list[Effect]:
        self._elsewhere(event.index).placement = Placement.LANDING
        return [Send(frame=Want(number=self.number, indices=[event.index]))]

    def _end_seen(self, event: EndSeen) -> list[Effect]:
        if event.total != len(self._chunks):
            raise RemoteProtocolError(f"END says {event.total} chunks, but {len(self._chunks)} were offered")
        self._total = event.total
        self.state = State.ENDED
        return self._finish_if_whole()

    def _cancel_seen(self, _event: CancelSeen) -> list[Effect]:
        return self._close(State.CANCELLED, keep=False)

    def _give_up(self, event: GiveUp) -> list[Effect]:
        frame = Failed(number=self.number, reason=event.reason, detail=event.detail)
        return [*self._close(State.FAILED, keep=False), Send(frame=frame)]

    def _connection_lost(self, _event: ConnectionLost) -> list[Effect]:
        return self._close(State.LOST, keep=True)

    def _unlease(self, _event: Event) -> list[Effect]:
        self.state = State.CANCELLED
        return [EndLeases(keep=False)]

    def _ignore(self, _event: Event) -> list[Effect]:
        return []

    def _close(self, state: State, *, keep: bool) -> list[Effect]:
        self.state = state
        landing = tuple(i for i, chunk in enumerate(self._chunks) if chunk.placement is Placement.LANDING)
        return [Abort(indices=landing), EndLeases(keep=keep)] if landing else [EndLeases(keep=keep)]

    def _finish_if_whole(self) -> list[Effect]:
        if self.state is not State.ENDED or self._num_held != self._total:
            return []
        self.state = State.LANDED
        return [EndLeases(keep=True), Announce()]

    def _hold(self, chunk: _Chunk) -> None:
        chunk.placement = Placement.HELD
        chunk.pieces.clear()
        chunk.good.clear()
        self._num_held += 1

    def _elsewhere(self, index: int) -> _Chunk:
        chunk = self._chunks[index]
        if chunk.placement is not Placement.ELSEWHERE:
            raise LocalProtocolError(f"chunk {index} is {chunk.placement.name}, not landing elsewhere")
        return chunk

    _TABLE: ClassVar[dict[tuple[State, type], Callable[["Receiver", Any], list[Effect]]]] = {
        (state, event): handler
        for events, states, handler in (
            ((Offered,), (State.OPEN,), _offered),
            ((PieceArrived,), _ACTIVE, _piece_arrived),
            ((NowHeld,), _ACTIVE, _now_held),
            ((NowOurs,), _ACTIVE, _now_ours),
            ((EndSeen,), (State.OPEN,), _end_seen),
            ((CancelSeen,), _ACTIVE, _cancel_seen),
            ((GiveUp,), _ACTIVE, _give_up),
            ((ConnectionLost,), _ACTIVE, _connection_lost),
            # The cancel crossed our LANDED: for the sender the transfer is cancelled, nobody will release it.
            ((CancelSeen,), (State.LANDED,), _unlease),
            # What the peer sent before it knew that this side had failed is late, not wrong.
            ((Offered, EndSeen, CancelSeen), (State.FAILED,), _ignore),
            ((PieceArrived,), (State.FAILED, State.CANCELLED, State.LOST), _ignore),
            ((GiveUp,), _TERMINAL, _ignore),
            ((ConnectionLost,), _TERMINAL, _ignore),
        )
        for event in events
        for state in states
    }
