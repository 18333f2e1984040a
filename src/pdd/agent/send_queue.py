"""The queue that all data streams to one peer take pieces from, and the order they are taken in."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

MIN_SHARE_BYTES: Final = 64 * 2**10
"""Pieces are not cut smaller: below this a frame's header, lock and system call cost more than they bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a chunk that is to cross the link."""

    number: int
    key: bytes
    index: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What an order may know of a transfer that has queued pieces."""

    number: int
    rank: int
    """Position in the order in which transfers were begun."""
    queued_bytes: int


Order = Callable[[Sequence[Waiting]], int]
"""The number of the transfer whose piece goes next; pure, so that a policy can take its place."""


def first_come(waiting: Sequence[Waiting]) -> int:
    """The transfer that was begun first."""
    return min(waiting, key=lambda transfer: transfer.rank).number


@dataclass(slots=True)
class _Line:
    rank: int
    pieces: deque[Piece]
    queued_bytes: int = 0


class SendQueue:
    """Pieces by transfer; closed once, with its session."""

    def __init__(self, order: Order = first_come) -> None:
        self._order = order
        self._changed = threading.Condition()
        self._lines: dict[int, _Line] = {}
        self._is_closed = False

    def put(self, pieces: Sequence[Piece], *, rank: int) -> None:
        """The pieces, all of one transfer, will be sent unless it is discarded."""
        with self._changed:
            line = self._lines.setdefault(pieces[0].number, _Line(rank=rank, pieces=deque()))
            line.pieces.extend(pieces)
            line.queued_bytes += sum(piece.length for piece in pieces)
            self._changed.notify(len(pieces))

    def discard(self, number: int) -> None:
        """No piece of the transfer is queued."""
        with self._changed:
            self._lines.pop(number, None)

    def take(self, max_bytes: int, *, num_takers: int = 1) -> list[Piece]:
        """The next pieces in order, one at least, more while they fit ``max_bytes``; none once closed.

        When little is left, a taker gets no more than its even share, and a piece is cut for that: the last
        megabyte on one of four streams would take four times as long, since each has a quarter of the line.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._lines))
            if self._is_closed:
                return []
            queued_bytes = sum(line.queued_bytes for line in self._lines.values())
            share_bytes = max(MIN_SHARE_BYTES, -(-queued_bytes // num_takers))
            left = min(max_bytes, share_bytes) if num_takers > 1 else max_bytes
            taken = [self._pop(left if num_takers > 1 else None)]
            left -= taken[0].length
            while self._lines:
                line = self._lines[self._next()]
                if line.pieces[0].length > left:
                    break
                taken.append(self._pop())
                left -= taken[-1].length
            return taken

    def close(self) -> None:
        """Nothing is queued or taken any more."""
        with self._changed:
            self._is_closed = True
            self._lines.clear()
            self._changed.notify_all()

    def _next(self) -> int:
        if len(self._lines) == 1:
            return next(iter(self._lines))
        return self._order(
            [
                Waiting(number=number, rank=line.rank, queued_bytes=line.queued_bytes)
                for number, line in self._lines.items()
            ]
        )

    def _pop(self, max_bytes: int | None = None) -> Piece:
        """The next piece is no longer queued, or only what is beyond ``max_bytes`` of it is."""
        number = self._next()
        line = self._lines[number]
        piece = line.pieces.popleft()
        if max_bytes is not None and piece.length > max_bytes:
            rest = replace(piece, offset=piece.offset + max_bytes, length=piece.length - max_bytes)
            line.pieces.appendleft(rest)
            piece = replace(piece, length=max_bytes)
            self._changed.notify()  # put counted one taker for the whole piece
        line.queued_bytes -= piece.length
        if not line.pieces:
            del self._lines[number]
        return piece
