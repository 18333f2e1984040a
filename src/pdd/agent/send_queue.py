"""The queue that all data streams to one peer take pieces from, in the order of ``pdd.policy.wan_order``."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdd.policy.wan_order import NextTransfer, OrderParams, WaitingTransfer, choose_next

_PARAMS: Final = OrderParams()
MIN_SHARE_BYTES: Final = 64 * 2**10
"""Pieces are not cut smaller: below this a frame's header, lock and system call cost more than they bring."""
_ALIGN_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a chunk that is to cross the link."""

    number: int
    key: bytes
    index: int
    offset: int
    length: int
    is_unasked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgency:
    """The router's words on a transfer's place in the line."""

    priority: int = 0
    is_unmasked: bool = False
    is_held: bool = False


Order = Callable[[Sequence[WaitingTransfer]], NextTransfer | None]


def send_order(waiting: Sequence[WaitingTransfer]) -> NextTransfer | None:
    """The order of ``pdd.policy.wan_order`` with its default parameters."""
    return choose_next(waiting, _PARAMS)


@dataclass(slots=True)
class _Line:
    rank: int
    urgency: Urgency
    since_s: float
    pieces: deque[Piece]
    queued_bytes: int = 0


class SendQueue:
    """Pieces by transfer; closed once, with its session.

    Args:
        order: Which transfer is next.
        clock: Seconds that only grow.
    """

    def __init__(self, order: Order = send_order, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._order = order
        self._clock = clock
        self._changed = threading.Condition()
        self._lines: dict[int, _Line] = {}
        self._takers: deque[object] = deque()
        """Who waits in ``take``, longest first."""
        self._share_bytes = 0
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """How many wait in ``take``."""
        return len(self._takers)

    def put(self, pieces: Sequence[Piece], *, rank: int, urgency: Urgency) -> None:
        """The pieces, all of one transfer, will be sent unless it is discarded."""
        with self._changed:
            line = self._lines.get(pieces[0].number)
            if line is None:
                line = _Line(rank=rank, urgency=urgency, since_s=self._clock(), pieces=deque())
                self._lines[pieces[0].number] = line
            line.pieces.extend(pieces)
            line.queued_bytes += sum(piece.length for piece in pieces)
            self._share_bytes = 0
            self._changed.notify_all()

    def discard(self, number: int) -> None:
        """No piece of the transfer is queued."""
        with self._changed:
            self._lines.pop(number, None)

    def discard_chunks(self, number: int, indices: Collection[int]) -> None:
        """No piece of these chunks of the transfer is queued."""
        with self._changed:
            line = self._lines.get(number)
            if line is None:
                return
            line.pieces = deque(piece for piece in line.pieces if piece.index not in indices)
            line.queued_bytes = sum(piece.length for piece in line.pieces)
            if not line.pieces:
                del self._lines[number]

    def take(self, max_bytes: int, *, num_takers: int = 1) -> list[Piece]:
        """The next pieces in order, one at least, more while they fit ``max_bytes``; none once closed.

        When little is left, a taker gets no more than its even share of it, a piece is cut for that, and who
        has waited longest comes first: the last megabyte on one of four streams would take four times as
        long, since each has a quarter of the line.
        """
        with self._changed:
            self._wait_for_turn(max_bytes * num_takers)
            if self._is_closed:
                return []
            left = max_bytes if num_takers == 1 else min(max_bytes, self._share(num_takers))
            number = self._next()
            taken = [self._pop(number, left if num_takers > 1 else None)]
            left -= taken[0].length
            while self._lines:
                # One decision serves as many of a transfer's pieces as fit: asking for each would cost more.
                number = number if number in self._lines else self._next()
                if self._lines[number].pieces[0].length > left:
                    break
                taken.append(self._pop(number))
                left -= taken[-1].length
            return taken

    def _wait_for_turn(self, plenty_bytes: int) -> None:
        """Something is queued, and it is this taker's turn if it is not plenty; or the queue is closed."""
        ticket = object()
        self._takers.append(ticket)

        def is_my_turn() -> bool:
            is_first = self._takers[0] is ticket
            return self._is_closed or (
                bool(self._lines) and (is_first or self._queued_bytes() > plenty_bytes)
            )

        self._changed.wait_for(is_my_turn)
        self._takers.remove(ticket)
        if self._takers and self._lines:
            self._changed.notify_all()

    def _share(self, num_takers: int) -> int:
        """An even share of what was left when something was last added; whole cache lines."""
        if not self._share_bytes:
            even = -(-self._queued_bytes() // num_takers)
            self._share_bytes = max(MIN_SHARE_BYTES, -(-even // _ALIGN_BYTES) * _ALIGN_BYTES)
        return self._share_bytes

    def _queued_bytes(self) -> int:
        return sum(line.queued_bytes for line in self._lines.values())

    def close(self) -> None:
        """Nothing is queued or taken any more."""
        with self._changed:
            self._is_closed = True
            self._lines.clear()
            self._changed.notify_all()

    def _next(self) -> int:
        if len(self._lines) == 1:
            return next(iter(self._lines))
        decision = self._order(
            [
                WaitingTransfer(
                    number=number,
                    begun=line.rank,
                    remaining_bytes=line.queued_bytes,
                    since_s=line.since_s,
                    priority=line.urgency.priority,
                    is_unmasked=line.urgency.is_unmasked,
                )
                for number, line in self._lines.items()
            ]
        )
        assert decision is not None  # held transfers are never queued
        return decision.number

    def _pop(self, number: int, max_bytes: int | None = None) -> Piece:
        """The transfer's next piece is no longer queued, or only what is beyond ``max_bytes`` of it is."""
        line = self._lines[number]
        piece = line.pieces.popleft()
        if max_bytes is not None and piece.length > max_bytes:
            rest = replace(piece, offset=piece.offset + max_bytes, length=piece.length - max_bytes)
            line.pieces.appendleft(rest)
            piece = replace(piece, length=max_bytes)
        line.queued_bytes -= piece.length
        if not line.pieces:
            del self._lines[number]
        return piece
