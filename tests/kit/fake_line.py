"""A line with a rate: what crosses it takes its turn, the most urgent first."""

import asyncio
import heapq
import itertools
from collections.abc import Callable

PIECE_BYTES = 1000


class FakeLine:
    """One direction between two sites, shared by all transfers that are given to it."""

    def __init__(self, rate_bytes_per_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.num_bytes = 0
        self._is_busy = False
        self._ranks = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def carry(self, num_bytes: int, *, priority: int, sent: Callable[[int], None]) -> None:
        """All bytes have crossed; lower priorities go first, then who came first."""
        rank = next(self._ranks)
        left = num_bytes
        while left:
            piece = min(left, PIECE_BYTES)
            await self._turn(priority, rank)
            try:
                sent(piece)
                self.num_bytes += piece
                await asyncio.sleep(piece / self.rate_bytes_per_s)
            finally:
                self._next()
            left -= piece

    async def _turn(self, priority: int, rank: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, rank, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()  # it was our turn already
            raise

    def _next(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False
