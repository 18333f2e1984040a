"""Moves packets between two sites: one thread, two sockets, one pipe per direction."""

import os
import random
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pdd.link.packet.frames import Packet, read_packet
from pdd.link.packet.middlebox import Middlebox
from pdd.link.packet.namespaces import Site
from pdd.link.packet.pipe import LineSettings, Pipe

_MAX_PACKET_BYTES: Final = 70_000
_MAX_BURST: Final = 64
"""Packets read from one side before the other gets its turn."""
_SOL_PACKET: Final = 263
_PACKET_STATISTICS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionState:
    """What one direction has carried since the start; bytes are whole Ethernet frames."""

    carried_segments: int
    carried_bytes: int
    lost_segments: int
    queue_dropped_segments: int
    overrun_packets: int
    """Packets that the emulator itself was too slow for: a run with any says little."""


@dataclass(slots=True, eq=False)
class _Direction:
    source: socket.socket
    sink: socket.socket
    pipe: Pipe
    num_overrun: int = 0


class PacketLoop:
    """The line at work. All methods but ``run`` may be called from any thread."""

    def __init__(self, a: Site, b: Site, settings: LineSettings, *, seed: int | None = None) -> None:
        self.settings = settings
        self.is_cut = False
        self._lock = threading.Lock()
        self._middlebox = Middlebox()
        self._directions = tuple(
            _Direction(source.packets, sink.packets, Pipe(settings, random.Random(seed)))
            for source, sink in ((a, b), (b, a))
        )
        self._wake_reader, self._wake_writer = os.pipe()
        self._is_closed = False

    def run(self) -> None:
        """Packets have moved until ``close``."""
        sources: list[socket.socket | int] = [direction.source for direction in self._directions]
        sources.append(self._wake_reader)
        while not self._is_closed:
            ready, _, _ = select.select(sources, [], [], self._wait_s())
            with self._lock:
                for direction in self._directions:
                    if direction.source in ready:
                        self._read(direction)
                    self._deliver(direction)
            if self._wake_reader in ready:
                os.read(self._wake_reader, 64)

    def configure(self, settings: LineSettings) -> None:
        """The line is as the settings say from now on."""
        with self._lock:
            self.settings = settings
            for direction in self._directions:
                direction.pipe.configure(settings)
        self._wake()

    def hold(self, *, held: bool) -> None:
        """Packets stand still in the queue, and beyond its end they are dropped; or they move again."""
        with self._lock:
            for direction in self._directions:
                direction.pipe.is_held = held
        self._wake()

    def cut(self, *, is_cut: bool) -> None:
        """Nothing crosses, and nobody is told; or the line carries again."""
        with self._lock:
            self.is_cut = is_cut
            for direction in self._directions:
                direction.pipe.clear()

    def state(self) -> tuple[DirectionState, DirectionState]:
        """Counters from a to b, and back."""
        with self._lock:
            first, second = (self._describe(direction) for direction in self._directions)
        return first, second

    @property
    def num_middlebox_drops(self) -> int:
        """Packets of connections that were forgotten for their silence."""
        return self._middlebox.num_dropped

    def close(self) -> None:
        """``run`` returns soon."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        os.write(self._wake_writer, b"x")

    def _wait_s(self) -> float | None:
        times = [direction.pipe.next_event_s() for direction in self._directions]
        due_s = min((time_s for time_s in times if time_s is not None), default=None)
        return None if due_s is None else max(0.0, due_s - time.monotonic())

    def _read(self, direction: _Direction) -> None:
        now_s = time.monotonic()
        for _ in range(_MAX_BURST):
            try:
                packet = read_packet(direction.source.recv(_MAX_PACKET_BYTES))
            except BlockingIOError:
                return
            if self._takes(packet, now_s):
                direction.pipe.push(packet, now_s)

    def _takes(self, packet: Packet, now_s: float) -> bool:
        idle_drop_s = self.settings.idle_drop_s
        if self.is_cut:
            return False
        return not idle_drop_s or self._middlebox.passes(packet, now_s, idle_drop_s=idle_drop_s)

    def _deliver(self, direction: _Direction) -> None:
        for packet in direction.pipe.advance(time.monotonic()):
            try:
                direction.sink.send(packet.data)
            except OSError:  # the device's queue is full: the emulator's fault, not the line's
                direction.num_overrun += 1

    def _describe(self, direction: _Direction) -> DirectionState:
        with suppress(OSError):  # reading the statistics resets them
            counts = direction.source.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
            direction.num_overrun += struct.unpack("II", counts)[1]
        counters = direction.pipe.counters
        return DirectionState(
            carried_segments=counters.carried_segments,
            carried_bytes=counters.carried_bytes,
            lost_segments=counters.lost_segments,
            queue_dropped_segments=counters.queue_dropped_segments,
            overrun_packets=direction.num_overrun,
        )
