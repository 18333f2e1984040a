"""One direction of a packet line as arithmetic: packets and times in, deliveries out.

A packet meets, in this order: loss, a drop-tail queue, a wire of some rate, and the delay. Knows no socket
and no clock. The wire runs on its own clock, so a caller that wakes late loses no throughput.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

from pdd.link.packet.frames import Packet, cut_packet

MIN_QUEUE_BYTES: Final = 128 * 2**10
"""No queue is shorter than two superpackets, whatever the line's product of rate and delay."""
MAX_TURN_S: Final = 0.001
"""A superpacket that takes the wire longer is cut, so that its first segments do not wait for its last."""
MAX_CATCH_UP_S: Final = 0.05
"""How far the wire's clock may lag behind the caller's; a process that was stopped longer lost that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSettings:
    """What a line does to packets, in each direction.

    ``rate_bytes_per_s`` counts whole Ethernet frames. ``queue_bytes`` of None is one round trip's worth.
    ``loss_ratio`` is the chance of each segment by itself. After ``idle_drop_s`` without a packet a TCP
    connection is forgotten by the line's middlebox, which then drops its packets without a word; with
    None or 0 there is no middlebox.
    """

    rate_bytes_per_s: float
    delay_s: float
    jitter_s: float = 0.0
    queue_bytes: int | None = None
    loss_ratio: float = 0.0
    idle_drop_s: float | None = None

    def __post_init__(self) -> None:
        """The values make sense.

        Raises:
            ValueError: If not.
        """
        if self.rate_bytes_per_s <= 0:
            raise ValueError("the rate must be above 0; use hold or cut to stop the line")
        if not 0 <= self.loss_ratio < 1:
            raise ValueError("the loss must be at least 0 and below 1")
        if self.jitter_s > self.delay_s:
            raise ValueError("the jitter cannot exceed the delay")

    @property
    def queue_limit_bytes(self) -> int:
        """Bytes that may wait for the wire."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        return max(MIN_QUEUE_BYTES, round(self.rate_bytes_per_s * 2 * self.delay_s))

    def changed(self, **changes: Any) -> "LineSettings":
        """These settings with some replaced; a change of None leaves the old value."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


@dataclass(slots=True)
class PipeCounters:
    """Segments and bytes since the start."""

    carried_segments: int = 0
    carried_bytes: int = 0
    lost_segments: int = 0
    queue_dropped_segments: int = 0


class Pipe:
    """Loss, queue, wire and delay of one direction.

    Args:
        settings: May be changed at any time through ``configure``.
        chance: Where loss and jitter come from; seeded for repeatable runs.
    """

    def __init__(self, settings: LineSettings, chance: random.Random) -> None:
        self.counters = PipeCounters()
        self.is_held = False
        self._chance = chance
        self._queue: deque[Packet] = deque()
        self._queued_bytes = 0
        self._on_the_way: deque[tuple[float, Packet]] = deque()
        self._wire_free_s = 0.0
        self._last_due_s = 0.0
        self.configure(settings)

    def configure(self, settings: LineSettings) -> None:
        """Packets that have not left the queue yet meet the new settings."""
        self._settings = settings
        self._until_loss = self._draw_loss()

    def push(self, packet: Packet, now_s: float) -> None:
        """The packet has entered the line, as far as it was not lost or dropped."""
        self._serve(now_s)
        for part in self._survivors(packet):
            self._enqueue(part, now_s)
        self._serve(now_s)

    def advance(self, now_s: float) -> list[Packet]:
        """All that has arrived by now, in order."""
        self._serve(now_s)
        arrived: list[Packet] = []
        while self._on_the_way and self._on_the_way[0][0] <= now_s:
            packet = self._on_the_way.popleft()[1]
            self.counters.carried_segments += packet.num_segments
            self.counters.carried_bytes += packet.wire_bytes
            arrived.append(packet)
        return arrived

    def next_event_s(self) -> float | None:
        """When ``advance`` has something to do; None if only ``push`` can change that."""
        times = [self._on_the_way[0][0]] if self._on_the_way else []
        if self._queue and not self.is_held:
            # Serving may wait for a moment: due times come from the wire's clock, not from the caller's.
            times.append(self._wire_free_s + min(self._settings.delay_s / 2, MAX_TURN_S))
        return min(times, default=None)

    def clear(self) -> None:
        """Whatever was on the line is gone."""
        self._queue.clear()
        self._queued_bytes = 0
        self._on_the_way.clear()

    def _survivors(self, packet: Packet) -> list[Packet]:
        parts: list[Packet] = []
        rest: Packet | None = packet
        while rest is not None:
            if self._until_loss >= rest.num_segments:
                self._until_loss -= rest.num_segments
                parts.append(rest)
                break
            at, self._until_loss = int(self._until_loss), self._draw_loss()
            self.counters.lost_segments += 1
            if at:
                first, rest = cut_packet(rest, at)
                parts.append(first)
            rest = cut_packet(rest, 1)[1] if rest.num_segments > 1 else None
        return parts

    def _draw_loss(self) -> float:
        """Segments that pass before the next is lost."""
        ratio = self._settings.loss_ratio
        if ratio <= 0:
            return math.inf
        return math.floor(math.log(1.0 - self._chance.random()) / math.log1p(-ratio))

    def _enqueue(self, packet: Packet, now_s: float) -> None:
        room_bytes = self._settings.queue_limit_bytes - self._queued_bytes
        if packet.wire_bytes > room_bytes:
            segment_wire_bytes = packet.header_bytes + packet.segment_bytes
            fitting = room_bytes // segment_wire_bytes if packet.num_segments > 1 else 0
            self.counters.queue_dropped_segments += packet.num_segments - fitting
            if fitting < 1:
                return
            packet = cut_packet(packet, fitting)[0]
        if not self._queue and not self.is_held:
            self._wire_free_s = max(self._wire_free_s, now_s)
        most = self._settings.rate_bytes_per_s * MAX_TURN_S / (packet.wire_bytes / packet.num_segments)
        per_turn = max(1, int(most))
        while packet.num_segments > per_turn:
            first, packet = cut_packet(packet, per_turn)
            self._wait(first)
        self._wait(packet)

    def _wait(self, packet: Packet) -> None:
        self._queue.append(packet)
        self._queued_bytes += packet.wire_bytes

    def _serve(self, now_s: float) -> None:
        """What the wire had time for is on its way."""
        if self.is_held:
            self._wire_free_s = now_s
            return
        self._wire_free_s = max(self._wire_free_s, now_s - MAX_CATCH_UP_S)
        settings = self._settings
        while self._queue and self._wire_free_s <= now_s:
            packet = self._queue.popleft()
            self._queued_bytes -= packet.wire_bytes
            self._wire_free_s += packet.wire_bytes / settings.rate_bytes_per_s
            jitter_s = (
                self._chance.uniform(-settings.jitter_s, settings.jitter_s) if settings.jitter_s else 0.0
            )
            # Routers keep the order of a flow; jitter that reordered packets would be another fault.
            self._last_due_s = max(self._last_due_s, self._wire_free_s + settings.delay_s + jitter_s)
            self._on_the_way.append((self._last_due_s, packet))
