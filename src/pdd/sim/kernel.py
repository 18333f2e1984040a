"""The event loop: a heap in one total order.

Owns time. Two events at one instant run by priority, then in the order they were scheduled, so a run is
repeatable.

Source:
    SimPy's event order (time, priority, sequence).
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from math import inf
from typing import Any

COMPLETION, ARRIVAL, DEFERRED = 0, 1, 2
"""Priorities: what ends at an instant frees room before what arrives at it takes some."""


@contextmanager
def collector_off() -> Iterator[None]:
    """The garbage collector rests: a run's columns hold no cycles, and each pass would walk all of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _nobody_arrives(_: int) -> None:
    """What happens at the arrivals of a run that has none."""


class Kernel:
    """Runs callbacks in order of (time, priority, sequence)."""

    __slots__ = ("_heap", "_num_arrived", "_sequence", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._sequence = 0
        self._num_arrived = 0

    @property
    def events(self) -> int:
        """How many have run."""
        return self._sequence - len(self._heap) + self._num_arrived

    def at(self, time_s: float, priority: int, action: Callable[[Any], None], argument: Any = None) -> None:
        """Schedules ``action(argument)``; a time in the past is taken as now."""
        self._sequence = sequence = self._sequence + 1
        if time_s < self.now_s:
            time_s = self.now_s
        heappush(self._heap, (time_s, priority, sequence, action, argument))

    def run(
        self,
        *,
        until_s: float = inf,
        arrivals: Sequence[float] = (),
        on_arrival: Callable[[int], None] = _nobody_arrives,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Runs until nothing is scheduled at or before ``until_s``.

        Args:
            until_s: Later events stay where they are.
            arrivals: Sorted times at which ``on_arrival(index)`` runs, after what else is due at that
                instant; kept out of the heap, since they are in order already.
            on_arrival: See there.
            on_progress: Told the time now and then.
        """
        for index, arrival_s in enumerate(arrivals):
            if arrival_s > until_s:
                break
            self._play(arrival_s)
            self.now_s = arrival_s
            self._num_arrived += 1
            on_arrival(index)
            if not index & 0xFFF and on_progress is not None:
                on_progress(arrival_s)
        self._play(until_s)

    def _play(self, until_s: float) -> None:
        """Nothing is scheduled at or before ``until_s`` any more."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, _, action, argument = heappop(heap)
            action(argument)
