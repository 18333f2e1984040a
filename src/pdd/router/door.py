"""The door of the router: how many requests are served at once, and who waits in front of it."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pdd.core.errors import DeadlineError, OverloadedError
from pdd.policy.admission import EntryDecision, EntryInput
from pdd.router.decisions import DecisionLog
from pdd.router.metrics import RouterMetrics

_WEIGHT = 0.05
"""Of the newest request in the mean service time."""
_ASSUMED_SERVICE_TIME_S = 1.0


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    rank: int
    turn: "asyncio.Future[None]" = field(compare=False)


class Door:
    """Lets requests in by priority, then by arrival.

    Args:
        max_concurrent: Most requests served at once.
        queue_size: Most requests that wait.
        metrics: Counted in.
        decisions: Written to.
    """

    def __init__(
        self, *, max_concurrent: int, queue_size: int, metrics: RouterMetrics, decisions: DecisionLog
    ) -> None:
        self._decisions = decisions
        self._max_concurrent = max_concurrent
        self._queue_size = queue_size
        self._metrics = metrics
        self._running = 0
        self._service_time_s = _ASSUMED_SERVICE_TIME_S
        self._ranks = itertools.count()
        self._waiting: list[_Waiter] = []

    @asynccontextmanager
    async def entered(self, request: str, *, priority: int, deadline_s: float) -> AsyncIterator[None]:
        """While the context is open, the request counts as served.

        Args:
            request: Its id.
            priority: Lower is more urgent.
            deadline_s: On the event loop's clock; who is not in by then has waited in vain.

        Raises:
            OverloadedError: If it is not let in, with a hint when to come back.
            DeadlineError: If its time is over before its turn.
        """
        await self._enter(request, priority, deadline_s)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            yield
        finally:
            self._service_time_s += _WEIGHT * (loop.time() - begun_s - self._service_time_s)
            self._leave()

    async def _enter(self, request: str, priority: int, deadline_s: float) -> None:
        facts = EntryInput(
            running=self._running,
            queued=len(self._waiting),
            priority=priority,
            worst_priority=max(self._waiting).priority if self._is_full else None,
            service_time_s=self._service_time_s,
            max_concurrent=self._max_concurrent,
            queue_size=self._queue_size,
        )
        decision: EntryDecision = self._decisions.decide("entry", request=request, facts=facts)
        if decision.action == "enter":
            self._running += 1
            return
        refusal = OverloadedError(
            f"{self._running} requests are being served and {len(self._waiting)} wait; come back in "
            f"{decision.retry_after_s} s",
            retry_after_s=decision.retry_after_s,
        )
        if decision.action == "refuse":
            self._metrics.refused.labels(reason=decision.reason).inc()
            raise refusal
        if decision.action == "displace":
            worst = max(self._waiting)
            self._remove(worst)
            if not worst.turn.done():  # else its client leaves at this moment
                worst.turn.set_exception(refusal)
            self._metrics.refused.labels(reason="displaced").inc()
        await self._wait(priority, deadline_s)

    @property
    def _is_full(self) -> bool:
        return bool(self._waiting) and len(self._waiting) >= self._queue_size

    async def _wait(self, priority: int, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(priority=priority, rank=next(self._ranks), turn=loop.create_future())
        heapq.heappush(self._waiting, waiter)
        self._metrics.queued.set(len(self._waiting))
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter.turn
        except TimeoutError:
            self._give_up(waiter)
            self._metrics.refused.labels(reason="deadline").inc()
            raise DeadlineError("the request's time was over before its turn came (it was queued)") from None
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._remove(waiter)
        elif waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
            self._leave()  # its turn had just come

    def _remove(self, waiter: _Waiter) -> None:
        self._waiting.remove(waiter)
        heapq.heapify(self._waiting)
        self._metrics.queued.set(len(self._waiting))

    def _leave(self) -> None:
        self._running -= 1
        while self._waiting and self._running < self._max_concurrent:
            waiter = heapq.heappop(self._waiting)
            self._metrics.queued.set(len(self._waiting))
            if not waiter.turn.done():
                self._running += 1
                waiter.turn.set_result(None)
