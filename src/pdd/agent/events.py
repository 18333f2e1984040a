"""The agent's event log: a bounded ring that replays, fed from any thread, read by the control API."""

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

RING_EVENTS: Final = 1024
EventFields = Mapping[str, Any]


class EventLog:
    """Numbers events and wakes readers."""

    def __init__(self) -> None:
        self.boot = secrets.token_hex(8)
        """Tells this life of the agent from any other, whose numbers mean other events."""
        self._lock = threading.Lock()
        self._ring: deque[dict[str, Any]] = deque(maxlen=RING_EVENTS)
        self._seq = 0
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def seq(self) -> int:
        """Number of the newest event; 0 if there was none."""
        return self._seq

    def emit(self, event: str, fields: EventFields) -> None:
        """The event has the next number, and every reader will see it."""
        with self._lock:
            self._seq += 1
            self._ring.append({"event": event, "seq": self._seq, **fields})
            for wake, loop in self._readers.items():
                loop.call_soon_threadsafe(wake.set)

    def after(self, seq: int) -> list[dict[str, Any]]:
        """Events with a higher number, as far back as the ring goes."""
        with self._lock:
            if not self._ring or self._seq <= seq:
                return []
            return [event for event in self._ring if event["seq"] > seq]

    async def follow(self, seq: int, *, ping_s: float) -> AsyncIterator[dict[str, Any]]:
        """Events after ``seq``, then each as it happens, and a ``ping`` when none did for a while."""
        wake = asyncio.Event()
        with self._lock:
            self._readers[wake] = asyncio.get_running_loop()
        try:
            while True:
                wake.clear()
                events = self.after(seq)
                for event in events:
                    seq = event["seq"]
                    yield event
                if events:
                    continue
                try:
                    async with asyncio.timeout(ping_s):
                        await wake.wait()
                except TimeoutError:
                    yield {"event": "ping", "seq": self._seq}
        finally:
            with self._lock:
                del self._readers[wake]
