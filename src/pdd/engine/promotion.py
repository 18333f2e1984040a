"""Bounds what the tier's lookups promise, so that no request waits for ever for its own chunks.

vLLM's primary tier protects only the key it is promoting. A tier that always answers HIT for a prompt larger
than the primary tier, or for two that together are, makes vLLM promote one chunk by evicting another of the
same scan, for ever: the request never runs. So a promise is counted from the lookup that gives it until the
request runs, and:

- a request gets at most three quarters of the primary tier, by position: beyond it, MISS;
- all requests that do not run yet get the same in sum: beyond it, RETRY for a bounded time, then MISS;
- only one request at a time may wait half served. Else two could each hold what the other lacks;
- a chunk that was promoted three times for one request was evicted twice meanwhile: MISS.

Pure: keys and requests are names, time is an argument.

Source:
    vllm/v1/kv_offload/tiering/manager.py@0.32.0 (``lookup``, ``_initiate_promotion``) and
    vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py@0.32.0 (``_maximal_prefix_lookup``:
    MISS ends a scan, RETRY goes on scanning and postpones the request).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

MAX_PROMOTIONS = 3
"""Per request and chunk. The first may lose its slot to a burst of stores; a second loss is a pattern."""

SHARE_NUMERATOR, SHARE_DENOMINATOR = 3, 4
"""Of the primary tier; the rest is for the stores of running requests."""


class Answer(Enum):
    """What a lookup may say about a chunk that is in the store."""

    PROMOTE = "promote"
    RETRY = "retry"
    MISS = "miss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An answer and why it was given; the reason is a metric label, so the set is closed."""

    answer: Answer
    reason: str


_GRANTED = Decision(answer=Answer.PROMOTE, reason="granted")
_TOO_LONG = Decision(answer=Answer.MISS, reason="request_share")
_EVICTED = Decision(answer=Answer.MISS, reason="evicted_again")
_FULL = Decision(answer=Answer.RETRY, reason="total_share")
_WAITED = Decision(answer=Answer.MISS, reason="waited_too_long")


@dataclass(slots=True)
class _Request:
    """What one request was promised: per key, how often."""

    promotions: dict[bytes, int] = field(default_factory=dict)
    last_asked_s: float = 0.0
    waiting_since_s: float | None = None


class PromotionBound:
    """Says, chunk by chunk, whether the tier may answer HIT."""

    def __init__(self, num_primary_chunks: int, *, retry_limit_s: float = 10.0, lapse_s: float = 5.0) -> None:
        """Nothing is promised yet.

        Args:
            num_primary_chunks: Slots of vLLM's primary tier.
            retry_limit_s: How long a request is told RETRY before it is told MISS. Only a safety: those it
                waits for run and release their promises, and computing a long prompt again costs more.
            lapse_s: A request that has not asked for so long holds no promise any more. vLLM tells when a
                request first runs and when it ends, but not when a preempted one runs again.
        """
        self._limit = num_primary_chunks * SHARE_NUMERATOR // SHARE_DENOMINATOR
        self._retry_limit_s = retry_limit_s
        self._lapse_s = lapse_s
        self._requests: dict[str, _Request] = {}
        self._holders: Counter[bytes] = Counter()
        self._starving: str | None = None
        self._swept_s = float("-inf")

    @property
    def limit_chunks(self) -> int:
        """Most chunks promised at once, to one request and to all."""
        return self._limit

    @property
    def promised_chunks(self) -> int:
        """Different chunks promised to requests that do not run yet."""
        return len(self._holders)

    def ask(self, request: str, key: bytes, *, chunk_number: int, now_s: float) -> Decision:
        """The promise is counted if the answer is PROMOTE.

        Args:
            request: Whose lookup this is.
            key: A chunk that is in the store and not in the primary tier.
            chunk_number: Its place in the request, from 1.
            now_s: Any monotonic clock.
        """
        if chunk_number > self._limit:
            return _TOO_LONG
        state = self._requests.setdefault(request, _Request())
        state.last_asked_s = now_s
        times = state.promotions.get(key, 0)
        if times >= MAX_PROMOTIONS:
            return _EVICTED
        if not times and key not in self._holders and self._must_wait(request, now_s):
            return self._wait(request, state, now_s)
        state.promotions[key] = times + 1
        state.waiting_since_s = None
        if not times:
            self._holders[key] += 1
        return _GRANTED

    def release(self, requests: Iterable[str]) -> None:
        """These requests run or have ended: they hold no promise any more."""
        for request in requests:
            state = self._requests.pop(request, None)
            if request == self._starving:
                self._starving = None
            if state is None:
                continue
            for key in state.promotions:
                self._holders[key] -= 1
                if not self._holders[key]:
                    del self._holders[key]

    def check_invariants(self) -> None:
        """The counts agree with what the requests hold; for tests."""
        held = Counter(key for state in self._requests.values() for key in state.promotions)
        assert held == self._holders
        assert len(self._holders) <= self._limit
        assert self._starving is None or self._starving in self._requests

    def _must_wait(self, request: str, now_s: float) -> bool:
        if self._starving not in (None, request) or len(self._holders) >= self._limit:
            self._drop_lapsed(request, now_s)
        if len(self._holders) >= self._limit:
            return True
        return self._starving not in (None, request)

    def _wait(self, request: str, state: _Request, now_s: float) -> Decision:
        if state.waiting_since_s is None:
            state.waiting_since_s = now_s
        if now_s - state.waiting_since_s >= self._retry_limit_s:
            if self._starving == request:
                self._starving = None
            return _WAITED
        if self._starving is None and state.promotions:
            self._starving = request
        return _FULL

    def _drop_lapsed(self, asking: str, now_s: float) -> None:
        # A waiting request asks for all its chunks in every step; one sweep in a while is enough.
        if now_s - self._swept_s < self._lapse_s / 10:
            return
        self._swept_s = now_s
        self.release(
            [
                request
                for request, state in self._requests.items()
                if request != asking and now_s - state.last_asked_s > self._lapse_s
            ]
        )
