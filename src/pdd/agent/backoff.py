"""When the next attempt to reach a peer is due: later after each that failed, sooner when there is news."""

import random
import threading
import time
from typing import Final

_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 5.0
_MAX_DOUBLINGS: Final = 16
"""Beyond all reason; a peer may be away for days, and a power of its attempts is no float any more."""
_BREAKER_FAILURES: Final = 3
"""Failed attempts in a row that open the breaker: from then on calls are spaced, whoever wants one."""


class Backoff:
    """The turns of one link's thread; there are none after ``close``."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_failures = 0
        """Attempts in a row that failed; counted by whoever makes them."""
        self._changed = threading.Condition()
        self._is_urgent = False
        self._attempted_s = -_MAX_RETRY_S

    @property
    def is_breaker_open(self) -> bool:
        """Whether the peer is to be taken for gone."""
        return self.num_failures >= _BREAKER_FAILURES

    def hurry(self) -> None:
        """There is news: it cuts the wait short, but never below a second after the last attempt."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify()

    def close(self) -> None:
        """No attempt is made any more."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()

    def wait_for_turn(self) -> bool:
        """The last attempt is long enough ago; whether to make one more."""
        jitter_ratio = random.uniform(1.0, 1.3)
        with self._changed:
            while not self.is_closed:
                pause_s = pause_after(self.num_failures, is_urgent=self._is_urgent) * jitter_ratio
                left_s = self._attempted_s + pause_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._attempted_s = time.monotonic()
            self._is_urgent = False
            return not self.is_closed


def pause_after(num_failures: int, *, is_urgent: bool) -> float:
    """Seconds between one attempt and the next, before jitter is added."""
    if is_urgent:
        return _MIN_RETRY_S
    doublings = min(max(0, num_failures - 1), _MAX_DOUBLINGS)
    return min(_MAX_RETRY_S, _MIN_RETRY_S * 2.0**doublings)
