"""The line between the sites as a fluid: flows share its rate, each with a cap, in the sender's own order.

Owns flows in flight. At most ``pool`` flows move at once, each at ``min(flow cap, rate / flows)``; the
others wait in the order of the WAN policy and may displace a flow of worse rank, since the sender works in
pieces of a few MiB.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, sqrt

from pdd.policy.wan_order import OrderParams, transfer_rank_s
from pdd.sim.kernel import COMPLETION, Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class LineProfile:
    """What a line is.

    Args:
        rate_bytes_per_s: Of the whole line, one way, after protocol overhead.
        rtt_s: Round trip.
        flow_bytes_per_s: Most one transfer gets (all its streams together).
        pool: Transfers that move at once.
    """

    rate_bytes_per_s: float
    rtt_s: float
    flow_bytes_per_s: float
    pool: int


def loss_limited_bytes_per_s(*, rtt_s: float, loss_ratio: float, segment_bytes: int = 1460) -> float:
    """What one loss-based TCP stream reaches; infinite without loss.

    Source:
        Mathis et al., "The macroscopic behavior of the TCP congestion avoidance algorithm", CCR 1997: rate =
        MSS / RTT * sqrt(3 / (2 p)). A stream of a modern stack (cubic, BBR) does better, so give the
        measured rate if known.
    """
    if loss_ratio <= 0:
        return inf
    return segment_bytes / rtt_s * sqrt(1.5 / loss_ratio)


class Flow:
    """One transfer; ``left_bytes`` is exact only while it waits."""

    __slots__ = (
        "finish_mark",
        "is_unmasked",
        "left_bytes",
        "on_done",
        "priority",
        "request",
        "since_s",
        "state",
    )

    def __init__(
        self,
        request: int,
        num_bytes: float,
        since_s: float,
        on_done: Callable[[int], None],
        priority: int,
        is_unmasked: bool,
    ) -> None:
        self.request, self.left_bytes, self.since_s, self.on_done = request, num_bytes, since_s, on_done
        self.priority, self.is_unmasked = priority, is_unmasked
        self.state = WAITING
        self.finish_mark = 0.0


WAITING, MOVING, OVER = 0, 1, 2


class Line:
    """Flows over one line."""

    __slots__ = (
        "_kernel",
        "_mark",
        "_moving",
        "_num_moving",
        "_order",
        "_profile",
        "_rate",
        "_sequence",
        "_since_s",
        "_waiting",
        "_wake_s",
        "cancelled_bytes",
        "offered_bytes",
        "waiting_bytes",
    )

    def __init__(self, kernel: Kernel, profile: LineProfile, order: OrderParams) -> None:
        self._kernel, self._profile, self._order = kernel, profile, order
        self._mark = 0.0  # bytes every moving flow has received since the start of time
        self._since_s = 0.0
        self._rate = 0.0
        self._moving: list[tuple[float, int, Flow]] = []
        self._num_moving = 0
        self._waiting: list[tuple[float, int, Flow]] = []
        self._sequence = 0
        self._wake_s = inf
        self.waiting_bytes = 0.0
        self.offered_bytes = 0.0
        self.cancelled_bytes = 0.0

    @property
    def share_bytes_per_s(self) -> float:
        """What one more flow would get if it moved at once."""
        share = self._profile.rate_bytes_per_s / (
            self._num_moving + 1 if self._num_moving < self._profile.pool else self._profile.pool
        )
        cap = self._profile.flow_bytes_per_s
        return share if share < cap else cap

    @property
    def sent_bytes(self) -> float:
        """Bytes put on the line, or still to be, without what was cancelled."""
        return self.offered_bytes - self.cancelled_bytes

    @property
    def is_full(self) -> bool:
        """Whether a new flow has to wait or displace another."""
        return self._num_moving >= self._profile.pool

    def use_ratio(self, span_s: float) -> float:
        """Bytes sent over what the line could have carried in a time."""
        profile = self._profile
        can_bytes_per_s = min(profile.rate_bytes_per_s, profile.flow_bytes_per_s * profile.pool)
        return self.sent_bytes / span_s / can_bytes_per_s

    def queue_s(self) -> float:
        """How long what waits now would take, the line being shared by a full pool."""
        profile = self._profile
        drain = min(profile.rate_bytes_per_s, profile.pool * profile.flow_bytes_per_s)
        return self.waiting_bytes / drain

    def send(
        self,
        request: int,
        num_bytes: float,
        *,
        on_done: Callable[[int], None],
        priority: int = 0,
        is_unmasked: bool = True,
    ) -> Flow:
        """Queues a transfer; ``on_done(request)`` runs when its last byte has left the line.

        ``priority`` and ``is_unmasked`` are the order's (``pdd.policy.wan_order``).
        """
        now = self._kernel.now_s
        flow = Flow(request, num_bytes, now, on_done, priority, is_unmasked)
        self.offered_bytes += num_bytes
        if self._num_moving:
            self._mark += (now - self._since_s) * self._rate
        self._since_s = now
        if self._num_moving < self._profile.pool:
            self._start(flow)
        else:
            self._displace_or_wait(flow)
        self._share()
        return flow

    def cancel(self, flow: Flow) -> float:
        """Takes a flow out at once and returns the bytes that were never sent."""
        if flow.state == OVER:
            return 0.0
        self._advance(self._kernel.now_s)
        if flow.state == MOVING:
            flow.left_bytes = max(0.0, flow.finish_mark - self._mark)
            self._num_moving -= 1
            flow.state = OVER
            self._refill()
            self._share()
        else:
            self.waiting_bytes -= flow.left_bytes
            flow.state = OVER
        self.cancelled_bytes += flow.left_bytes
        return flow.left_bytes

    def _advance(self, now: float) -> None:
        if self._num_moving:
            self._mark += (now - self._since_s) * self._rate
        self._since_s = now

    def _start(self, flow: Flow) -> None:
        flow.state = MOVING
        flow.finish_mark = self._mark + flow.left_bytes
        self._sequence += 1
        heappush(self._moving, (flow.finish_mark, self._sequence, flow))
        self._num_moving += 1

    def _wait(self, flow: Flow) -> None:
        flow.state = WAITING
        self._sequence += 1
        heappush(self._waiting, (self._rank_s(flow, flow.left_bytes), self._sequence, flow))
        self.waiting_bytes += flow.left_bytes

    def _rank_s(self, flow: Flow, remaining_bytes: float) -> float:
        return transfer_rank_s(
            since_s=flow.since_s,
            remaining_bytes=remaining_bytes,
            priority=flow.priority,
            is_unmasked=flow.is_unmasked,
            params=self._order,
        )

    def _displace_or_wait(self, flow: Flow) -> None:
        if self._order.order == "first-come":
            self._wait(flow)
            return
        moving = [item for item in self._moving if item[2].state == MOVING]
        ranks = [self._rank_s(item[2], item[0] - self._mark) for item in moving]
        worst_rank = max(ranks)
        if worst_rank <= self._rank_s(flow, flow.left_bytes):
            self._wait(flow)
            return
        worst = moving[ranks.index(worst_rank)]
        victim = worst[2]
        victim.left_bytes = max(0.0, victim.finish_mark - self._mark)
        self._moving.remove(worst)
        heapify(self._moving)
        self._num_moving -= 1
        self._wait(victim)
        self._start(flow)

    def _refill(self) -> None:
        waiting, pool = self._waiting, self._profile.pool
        while waiting and self._num_moving < pool:
            flow = heappop(waiting)[2]
            if flow.state == WAITING:
                self.waiting_bytes -= flow.left_bytes
                self._start(flow)

    def _share(self) -> None:
        """Recomputes the common rate and makes sure the line wakes when its first flow ends."""
        count = self._num_moving
        if not count:
            self._rate = 0.0
            return
        share = self._profile.rate_bytes_per_s / count
        cap = self._profile.flow_bytes_per_s
        self._rate = share = share if share < cap else cap
        moving = self._moving
        while moving[0][2].state != MOVING:
            heappop(moving)
        ends_s = self._since_s + (moving[0][0] - self._mark) / share
        # A wake-up that comes too early re-schedules itself, so only an earlier end needs a new event.
        if ends_s < self._wake_s:
            self._wake_s = ends_s
            self._kernel.at(ends_s, COMPLETION, self._wake, ends_s)

    def _wake(self, scheduled_s: float) -> None:
        if scheduled_s != self._wake_s:
            return
        self._wake_s = inf
        self._advance(self._kernel.now_s)
        moving = self._moving
        # What rounding of the clock and of a long sum may leave: without it a flow could wake for ever at
        # one instant.
        mark = self._mark * (1 + 1e-15) + self._rate * self._kernel.now_s * 2e-15 + 1e-9
        if moving and moving[0][0] > mark and moving[0][2].state == MOVING:
            self._share()  # woken too early: others joined since
            return
        done = []
        while moving and (moving[0][2].state != MOVING or moving[0][0] <= mark):
            flow = heappop(moving)[2]
            if flow.state == MOVING:
                flow.state = OVER
                self._num_moving -= 1
                done.append(flow)
        if self._waiting:
            self._refill()
        self._share()
        for flow in done:
            flow.on_done(flow.request)
