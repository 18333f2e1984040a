"""One transfer to one peer as its sender sees it: a table of (state, event) -> effects.

The machine outlives sessions: when a connection is lost it is PARKED, and at the next session it offers
everything again under a new number; the receiver then wants only what it still lacks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, Final

from pdd.core.errors import InvariantError, LocalProtocolError, RemoteProtocolError
from pdd.wire.frames import MAX_KEYS_PER_OFFER, Cancel, End, Offer

MAX_RESENT_PIECES: Final = 64
"""Pieces a peer may ask for again in one session; the receiver gives up long before."""


class State(Enum):
    """Where the transfer stands."""

    PARKED = auto()
    OPEN = auto()
    ENDED = auto()
    LANDED = auto()
    FAILED = auto()


_CONNECTED: Final = (State.OPEN, State.ENDED)
_TERMINAL: Final = (State.LANDED, State.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session is up; ``number`` stands for the transfer in it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The next chunks of the prompt are in the store, under these keys."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """All chunks of the prompt are in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendUnasked:
    """These offered chunks go out although the peer has not said yet whether it lacks them."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantSeen:
    """WANT arrived."""

    indices: Sequence[int]
    pieces: Sequence[tuple[int, int, int]] = ()
    answered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AckSeen:
    """ACK arrived."""

    indices: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedSeen:
    """LANDED arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSeen:
    """FAILED arrived."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """This side gives the transfer up."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    """The session ended."""


Event = (
    Opened
    | Grown
    | Completed
    | SendUnasked
    | WantSeen
    | AckSeen
    | LandedSeen
    | FailedSeen
    | Stop
    | ConnectionLost
)
_FROM_PEER = (WantSeen, AckSeen, LandedSeen, FailedSeen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send this frame."""

    frame: Offer | End | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueue:
    """Send these ``(index, offset, length)`` pieces when their turn comes."""

    pieces: tuple[tuple[int, int, int], ...]
    is_unasked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """The peer has no use for these chunks: their pieces that are still queued are not to be sent."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unqueue:
    """Pieces still queued for the transfer are not to be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Land:
    """The transfer has ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The transfer has ended otherwise."""

    reason: str
    detail: str


Effect = Send | Enqueue | Withdraw | Unqueue | Land | Fail


class Sender:
    """The sending half of one transfer to one peer."""

    def __init__(self, *, transfer: str, chunk_bytes: int, piece_bytes: int) -> None:
        self.state = State.PARKED
        self.number = 0
        self.chunk_bytes = chunk_bytes
        self._transfer = transfer
        self._piece_bytes = piece_bytes
        self._keys: list[bytes] = []
        self._is_complete = False
        self._wanted: set[int] = set()
        self._unasked: set[int] = set()
        """Sent or queued for sending, and not answered yet."""
        self._num_answered = 0
        self._num_resent = 0
        self._crossed: set[int] = set()

    @property
    def is_active(self) -> bool:
        """Whether it can still land."""
        return self.state in (State.PARKED, State.OPEN, State.ENDED)

    @property
    def keys(self) -> Sequence[bytes]:
        """Keys of the chunks so far, by index."""
        return self._keys

    @property
    def outstanding_bytes(self) -> int:
        """Bytes wanted by the peer or sent unasked, and not acknowledged or declined yet."""
        return (len(self._wanted) + len(self._unasked)) * self.chunk_bytes

    @property
    def unasked(self) -> frozenset[int]:
        """Chunks sent, or queued for sending, before the peer has answered."""
        return frozenset(self._unasked)

    @property
    def unasked_bytes(self) -> int:
        """Bytes sent, or queued for sending, before the peer has answered."""
        return len(self._unasked) * self.chunk_bytes

    @property
    def num_answered(self) -> int:
        """Chunks the peer has looked up in this session."""
        return self._num_answered

    def peer_lacks(self, index: int) -> bool | None:
        """Whether the peer lacked the chunk when it was offered, or is taken to lack it; None if unknown."""
        if index in self._wanted or index in self._unasked or index in self._crossed:
            return True
        return False if index < self._num_answered else None

    @property
    def num_crossed(self) -> int:
        """Chunks acknowledged, that is, sent and landed."""
        return len(self._crossed)

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

    def check_invariants(self) -> None:
        """Nothing, if the state is consistent.

        Raises:
            InvariantError: If not.
        """
        num_keys = len(self._keys)
        broken = [
            name
            for name, is_good in (
                ("wanted is offered", all(index < num_keys for index in self._wanted)),
                ("crossed is offered", all(index < num_keys for index in self._crossed)),
                ("parked wants nothing", self.state is not State.PARKED or not self.outstanding_bytes),
                ("unasked is open", all(self._num_answered <= index < num_keys for index in self._unasked)),
                ("unasked is not wanted", not self._unasked & self._wanted),
                ("ended is complete", self.state not in (State.ENDED, State.LANDED) or self._is_complete),
                ("terminal wants nothing", self.is_active or not self.outstanding_bytes),
            )
            if not is_good
        ]
        if broken:
            raise InvariantError(f"sender of {self._transfer} in {self.state.name}: {', '.join(broken)}")

    def _opened(self, event: Opened) -> list[Effect]:
        self.number = event.number
        self._num_resent = self._num_answered = 0
        self.state = State.OPEN
        effects = self._offers(0)
        if self._is_complete:
            effects += self._end()
        return effects

    def _grown_parked(self, event: Grown) -> list[Effect]:
        self._keys.extend(event.keys)
        return []

    def _grown(self, event: Grown) -> list[Effect]:
        first = len(self._keys)
        self._keys.extend(event.keys)
        return self._offers(first)

    def _completed_parked(self, _event: Completed) -> list[Effect]:
        self._is_complete = True
        return []

    def _completed(self, _event: Completed) -> list[Effect]:
        self._is_complete = True
        return self._end()

    def _send_unasked(self, event: SendUnasked) -> list[Effect]:
        for index in event.indices:
            if not self._num_answered <= index < len(self._keys) or index in self._unasked:
                raise LocalProtocolError(f"chunk {index} was answered, or is not offered, or is on its way")
            self._unasked.add(index)
        pieces = [piece for index in event.indices for piece in self._pieces_of(index)]
        return [Enqueue(pieces=tuple(pieces), is_unasked=True)] if pieces else []

    def _want_seen(self, event: WantSeen) -> list[Effect]:
        if event.answered and not self._num_answered <= event.answered <= len(self._keys):
            raise RemoteProtocolError(f"{event.answered} chunks answered, {len(self._keys)} were offered")
        self._num_answered = max(self._num_answered, event.answered)
        answered = {index for index in self._unasked if index < self._num_answered}
        self._unasked -= answered
        pieces: list[tuple[int, int, int]] = []
        for index in event.indices:
            if index >= len(self._keys) or index in self._wanted or index in self._unasked:
                raise RemoteProtocolError(f"WANT of chunk {index}, not offered or wanted twice")
            self._wanted.add(index)
            if index not in answered:
                pieces.extend(self._pieces_of(index))
        declined = tuple(sorted(answered - self._wanted))
        withdraw: list[Effect] = [Withdraw(indices=declined)] if declined else []
        pieces.extend(self._again(event))
        return [*withdraw, Enqueue(pieces=tuple(pieces))] if pieces else withdraw

    def _pieces_of(self, index: int) -> list[tuple[int, int, int]]:
        return [
            (index, offset, min(self._piece_bytes, self.chunk_bytes - offset))
            for offset in range(0, self.chunk_bytes, self._piece_bytes)
        ]

    def _again(self, event: WantSeen) -> list[tuple[int, int, int]]:
        """The pieces that arrived corrupt.

        Raises:
            RemoteProtocolError: If one of them was not sent, or there are too many.
        """
        for index, offset, length in event.pieces:
            if (
                index not in self._wanted
                or not 0 < length <= self._piece_bytes
                or offset + length > self.chunk_bytes
            ):
                raise RemoteProtocolError(f"WANT of piece {index}+{offset}:{length}, which was not sent")
        self._num_resent += len(event.pieces)
        if self._num_resent > MAX_RESENT_PIECES:
            raise RemoteProtocolError("the peer asks for too many pieces again")
        return list(event.pieces)

    def _ack_seen(self, event: AckSeen) -> list[Effect]:
        for index in event.indices:
            if index not in self._wanted:
                raise RemoteProtocolError(f"ACK of chunk {index}, which is not wanted")
            self._wanted.discard(index)
            self._crossed.add(index)
        return []

    def _landed_seen(self, _event: LandedSeen) -> list[Effect]:
        if self.outstanding_bytes:
            raise RemoteProtocolError("LANDED while chunks are not acknowledged")
        self.state = State.LANDED
        return [Land()]

    def _failed_seen(self, event: FailedSeen) -> list[Effect]:
        return self._fail(event.reason, event.detail)

    def _stop(self, event: Stop) -> list[Effect]:
        return [*self._fail(event.reason, event.detail), Send(frame=Cancel(number=self.number))]

    def _stop_parked(self, event: Stop) -> list[Effect]:
        self.state = State.FAILED
        return [Fail(reason=event.reason, detail=event.detail)]

    def _connection_lost(self, _event: ConnectionLost) -> list[Effect]:
        self.state = State.PARKED
        self._wanted.clear()
        self._unasked.clear()
        return [Unqueue()]

    def _ignore(self, _event: Event) -> list[Effect]:
        return []

    def _fail(self, reason: str, detail: str) -> list[Effect]:
        self.state = State.FAILED
        self._wanted.clear()
        self._unasked.clear()
        return [Unqueue(), Fail(reason=reason, detail=detail)]

    def _offers(self, first: int) -> list[Effect]:
        return [
            Send(
                frame=Offer(
                    number=self.number,
                    transfer=self._transfer,
                    first=start,
                    keys=self._keys[start : start + MAX_KEYS_PER_OFFER],
                )
            )
            for start in range(first, len(self._keys), MAX_KEYS_PER_OFFER)
        ]

    def _end(self) -> list[Effect]:
        self.state = State.ENDED
        return [Send(frame=End(number=self.number, total=len(self._keys)))]

    _TABLE: ClassVar[dict[tuple[State, type], Callable[["Sender", Any], list[Effect]]]] = {
        (state, event): handler
        for events, states, handler in (
            ((Opened,), (State.PARKED,), _opened),
            ((Grown,), (State.PARKED,), _grown_parked),
            ((Grown,), (State.OPEN,), _grown),
            ((Completed,), (State.PARKED,), _completed_parked),
            ((Completed,), (State.OPEN,), _completed),
            ((SendUnasked,), (State.OPEN,), _send_unasked),
            ((WantSeen,), _CONNECTED, _want_seen),
            ((AckSeen,), _CONNECTED, _ack_seen),
            ((LandedSeen,), (State.ENDED,), _landed_seen),
            ((FailedSeen,), _CONNECTED, _failed_seen),
            ((Stop,), (State.PARKED,), _stop_parked),
            ((Stop,), _CONNECTED, _stop),
            ((ConnectionLost,), _CONNECTED, _connection_lost),
            ((ConnectionLost,), (State.PARKED,), _ignore),
            ((Grown, Completed, Stop, ConnectionLost), _TERMINAL, _ignore),
            # What the peer sent before it knew that this side had failed is late, not wrong.
            (_FROM_PEER, (State.FAILED,), _ignore),
        )
        for event in events
        for state in states
    }
