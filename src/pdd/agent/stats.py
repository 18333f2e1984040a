"""What an agent knows of a link from using it: rate, round trip and loss."""

import math
import threading
from collections import deque
from typing import Final

_WINDOW_S: Final = 0.1
"""Shortest span a rate is measured over."""
_MEMORY_S: Final = 1.0
"""After so many seconds of traffic an old rate weighs 1/e."""
_MIN_WINDOW_BYTES: Final = 64 * 2**10
"""Less than this says more about round trips than about the rate."""
_LOSS_WINDOW_SEGMENTS: Final = 2000
"""About 3 MB. What is counted of fewer says little: at 0.01 % one in five such windows has a loss."""
_LOSS_WEIGHT: Final = 0.25
_RTT_WINDOW_S: Final = 60.0
"""A route that got longer is believed after so long."""


class RateMeter:
    """Acknowledged payload bytes per second while there is something to send."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate_bytes_per_s: float | None = None
        self._window_start_s: float | None = None
        self._window_bytes = 0

    @property
    def rate_bytes_per_s(self) -> float | None:
        """The believed rate; None before anything was measured."""
        return self._rate_bytes_per_s

    def busy(self, now_s: float) -> None:
        """Bytes are on their way from now on, if none were."""
        with self._lock:
            if self._window_start_s is None:
                self._window_start_s, self._window_bytes = now_s, 0

    def acknowledged(self, num_bytes: int, *, is_drained: bool, now_s: float) -> None:
        """The bytes have crossed; ``is_drained`` if no others are on their way.

        News of no bytes does not end a window: those on their way would count for the short rest of it.
        """
        with self._lock:
            if self._window_start_s is None or not (num_bytes or is_drained):
                return
            self._window_bytes += num_bytes
            span_s = now_s - self._window_start_s
            if span_s < _WINDOW_S and not is_drained:
                return
            if self._window_bytes >= _MIN_WINDOW_BYTES and span_s > 0:
                self._blend(self._window_bytes / span_s, span_s)
            self._window_start_s, self._window_bytes = (None if is_drained else now_s), 0

    def idle(self) -> None:
        """Nothing is on its way any more, and the last window says nothing."""
        with self._lock:
            self._window_start_s = None

    def _blend(self, measured: float, span_s: float) -> None:
        old = self._rate_bytes_per_s
        weight = 1 - math.exp(-span_s / _MEMORY_S)
        self._rate_bytes_per_s = measured if old is None else old + weight * (measured - old)


class RoundTrip:
    """Round-trip time of the line itself, by PING: the least seen lately.

    A ping behind bulk data measures the queue too, which is counted in bytes already; the least of many is
    what the line takes when nothing is in the way. The window moves on only with new answers, so that an idle
    link keeps what it knew. Answers come on another thread than questions.

    Source:
        BBR's ``min_rtt`` filter (draft-ietf-ccwg-bbr, section 5.5.7), with a longer window: nothing here
        drains the queue on purpose.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent_s: dict[int, float] = {}
        self._next = 0
        self._answers: deque[tuple[float, float]] = deque()
        """Time and round trip, both rising: an answer makes all longer ones before it pointless."""

    @property
    def rtt_s(self) -> float | None:
        """The least round trip of the window; None before the first answer."""
        with self._lock:
            return self._answers[0][1] if self._answers else None

    @property
    def oldest_unanswered_s(self) -> float | None:
        """When the oldest ping without an answer was sent; None if all were answered."""
        with self._lock:
            return next(iter(self._sent_s.values()), None)

    def ping(self, now_s: float) -> int:
        """The nonce of a ping sent now."""
        with self._lock:
            self._next = (self._next + 1) % 2**32
            self._sent_s[self._next] = now_s
            return self._next

    def pong(self, nonce: int, now_s: float) -> None:
        """The answer arrived now; one to no ping of ours changes nothing."""
        with self._lock:
            sent_s = self._sent_s.pop(nonce, None)
            if sent_s is None:
                return
            while self._answers and self._answers[-1][1] >= now_s - sent_s:
                self._answers.pop()
            self._answers.append((now_s, now_s - sent_s))
            while self._answers[0][0] < now_s - _RTT_WINDOW_S:
                self._answers.popleft()


class LossMeter:
    """Part of the data segments that TCP had to send again: what the line loses, as the sender sees it."""

    def __init__(self) -> None:
        self._ratio: float | None = None
        self._counted = (0, 0)

    @property
    def ratio(self) -> float | None:
        """The believed loss; None before enough was sent."""
        return self._ratio

    def update(self, num_sent: int, num_again: int) -> None:
        """The totals of the session's connections are these now; smaller ones are a new session's."""
        if num_sent < self._counted[0] or num_again < self._counted[1]:
            self._counted = (0, 0)
        sent, again = num_sent - self._counted[0], num_again - self._counted[1]
        if sent < _LOSS_WINDOW_SEGMENTS:
            return
        self._counted = (num_sent, num_again)
        measured = again / sent
        self._ratio = (
            measured if self._ratio is None else self._ratio + _LOSS_WEIGHT * (measured - self._ratio)
        )
