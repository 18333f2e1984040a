"""One direction of an emulated line, as arithmetic: items and times in, deliveries out.

Owns rate, delay, fairness and order. Knows no socket and no clock: time enters as ``now_s``.

The line is a serial wire followed by a pipe. The wire takes one item after the other at the line's rate,
from all flows in turn; the pipe adds the one-way delay. A wire that always has something to send runs on
its own clock rather than the caller's, so a caller that wakes late loses no throughput.
"""

import enum
from collections import deque
from dataclasses import dataclass, field

MIN_QUANTUM_BYTES = 16 * 2**10
QUANTUM_S = 0.001
"""A flow's turn on the wire: about a millisecond of it, but no less than 16 KiB. Shorter turns would be
fairer at a finer grain and cost more Python than the line can carry."""

MAX_CATCH_UP_S = 0.05
"""How far the wire's clock may lag behind the caller's; a process that was stopped longer lost that time."""


class End(enum.Enum):
    """What ends a flow; travels the line in its place after the bytes before it."""

    EOF = "eof"
    RESET = "reset"


Item = bytes | memoryview | End


@dataclass(slots=True, eq=False)
class Flow:
    """One direction of one connection: what waits for the wire, and what is on its way.

    ``frozen`` holds what arrived while the flow was held.
    """

    waiting: deque[Item] = field(default_factory=deque)
    queued_bytes: int = 0
    held: bool = False
    dropped: bool = False
    frozen: deque[Item] = field(default_factory=deque)


class Line:
    """Serial wire and delay of one direction, shared fairly by any number of flows.

    Args:
        rate_bytes_per_s: What the wire carries, payload only.
        delay_s: One-way delay of every byte.
    """

    def __init__(self, *, rate_bytes_per_s: float, delay_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.delay_s = delay_s
        self._turns: deque[Flow] = deque()
        self._on_the_way: deque[tuple[float, Flow, Item]] = deque()
        self._thawed: deque[Flow] = deque()
        self._wire_free_s = 0.0
        self._last_due_s = 0.0

    def send(self, flow: Flow, item: Item, now_s: float) -> None:
        """The item waits for the wire; ``advance`` will deliver it."""
        if flow.dropped:
            return
        if not flow.waiting and not flow.held:
            self._take_a_turn(flow, now_s)
        flow.waiting.append(item)
        if not isinstance(item, End):
            flow.queued_bytes += len(item)

    def advance(self, now_s: float) -> list[tuple[Flow, Item]]:
        """Everything that has arrived by ``now_s``, in order; waiting items went onto the wire."""
        arrived = [(flow, item) for flow in self._thawed if not flow.held for item in self._thaw(flow)]
        self._thawed.clear()
        self._wire_free_s = max(self._wire_free_s, now_s - MAX_CATCH_UP_S)
        while self._turns and self._wire_free_s <= now_s:
            self._serve(self._turns.popleft())
        while self._on_the_way and self._on_the_way[0][0] <= now_s:
            _, flow, item = self._on_the_way.popleft()
            if flow.dropped:
                continue
            if flow.held:
                flow.frozen.append(item)
            else:
                self._leave(flow, item)
                arrived.append((flow, item))
        return arrived

    def next_event_s(self) -> float | None:
        """When ``advance`` has something to do next; None if only ``send`` can change that."""
        times = [0.0] if self._thawed else []
        if self._turns:
            times.append(self._wire_free_s)
        if self._on_the_way:
            times.append(self._on_the_way[0][0])
        return min(times, default=None)

    def hold(self, flow: Flow) -> None:
        """Nothing of the flow moves or arrives until it is released; the others get its share."""
        flow.held = True
        if flow in self._turns:
            self._turns.remove(flow)

    def release(self, flow: Flow, now_s: float) -> None:
        """The flow moves again; what arrived meanwhile is delivered by the next ``advance``."""
        if not flow.held:
            return
        flow.held = False
        if flow.frozen:
            self._thawed.append(flow)
        if flow.waiting:
            self._take_a_turn(flow, now_s)

    def drop(self, flow: Flow) -> None:
        """Nothing more of the flow will be delivered."""
        flow.dropped = True
        flow.waiting.clear()
        flow.frozen.clear()
        flow.queued_bytes = 0
        if flow in self._turns:
            self._turns.remove(flow)

    def _take_a_turn(self, flow: Flow, now_s: float) -> None:
        if not self._turns:  # the wire was idle: it starts now, not when it ended last
            self._wire_free_s = max(self._wire_free_s, now_s)
        self._turns.append(flow)

    def _serve(self, flow: Flow) -> None:
        left = max(MIN_QUANTUM_BYTES, int(self.rate_bytes_per_s * QUANTUM_S))
        while flow.waiting and left > 0:
            item = flow.waiting.popleft()
            if not isinstance(item, End):
                if len(item) > left:
                    view = memoryview(item)
                    flow.waiting.appendleft(view[left:])
                    item = view[:left]
                left -= len(item)
                self._wire_free_s += len(item) / self.rate_bytes_per_s
            # A shorter delay, set meanwhile, must not let bytes overtake each other.
            self._last_due_s = max(self._last_due_s, self._wire_free_s + self.delay_s)
            self._on_the_way.append((self._last_due_s, flow, item))
        if flow.waiting:
            self._turns.append(flow)

    def _thaw(self, flow: Flow) -> list[Item]:
        items = list(flow.frozen)
        flow.frozen.clear()
        for item in items:
            self._leave(flow, item)
        return items

    @staticmethod
    def _leave(flow: Flow, item: Item) -> None:
        if not isinstance(item, End):
            flow.queued_bytes -= len(item)
