"""The event loop: a heap in one total order.

Owns time. Two events at one instant run by priority, then in the order they were scheduled, so a run is repeatable.

Source:
    SimPy's event order (time, priority, sequence).
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

COMPLETION, ARRIVAL, DEFERRED = 0, 1, 2
"""Priorities: what ends at an instant frees room before what arrives at it takes some."""


class Kernel:
    """Runs callbacks in order of (time, priority, sequence)."""

    __slots__ = ("_heap", "_sequence", "events", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._sequence = 0

    def at(self, time_s: float, priority: int, action: Callable[[Any], None], argument: Any = None) -> None:
        """Schedules ``action(argument)``; a time in the past is taken as now."""
        self._sequence += 1
        now = self.now_s
        heappush(self._heap, (time_s if time_s > now else now, priority, self._sequence, action, argument))

    def run(self, *, until_s: float = float("inf"), on_progress: Callable[[float], None] | None = None) -> None:
        """Runs until nothing is scheduled at or before ``until_s``; tells progress now and then."""
        heap = self._heap
        events = 0
        while heap:
            if heap[0][0] > until_s:
                break
            time_s, _, _, action, argument = heappop(heap)
            self.now_s = time_s
            action(argument)
            events += 1
            if on_progress is not None and not events & 0x3FFF:
                on_progress(time_s)
        self.events += events
