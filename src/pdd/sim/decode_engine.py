"""A decode engine as a fluid: all its requests gain tokens at one common rate, between events.

Owns admission by memory and by time per token, the common rate, and the order of endings. The rate follows
the roofline (or a measured curve): ``1 / (base[batch] + per_context * context tokens)``; an engine that also
prefills makes one token a chunk meanwhile.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pdd.sim.kernel import COMPLETION, Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """What an engine's step costs and how much it holds.

    Args:
        base_s: Step time of a batch without context, by batch size, from 0.
        per_context_s: Added per token of context in the batch.
        capacity_tokens: KV tokens that fit.
        max_step_s: A request is admitted only if the step stays within; inf for no bound.
        extend_s, extend_per_context_s: Recomputing one token at the handoff: fixed part, and per token of
            context.
    """

    base_s: Sequence[float]
    per_context_s: float
    capacity_tokens: float
    max_step_s: float = inf
    extend_s: float = 0.0
    extend_per_context_s: float = 0.0


Admission = tuple[float, float, float, float]
"""What a request brings when it starts: the KV tokens it holds; the tokens it makes here; how many of its
context have to be recomputed here, while the others wait; and for how many seconds its place is taken before
its first token (loading KV, a round trip). A bare tuple: one is made per request in the hottest path.
"""
StartHook = Callable[[int], Admission | None]
"""Called when a request gets its place; None: it has no need of one any more."""


class DecodeEngine:
    """One engine. ``join`` asks for a place; the start hook then says what the request brings at that
    moment. ``step_s`` is the time per token now, or of a lone request.
    """

    __slots__ = (
        "_floor_s",
        "_heap",
        "_kernel",
        "_max_batch",
        "_num_removed",
        "_on_done",
        "_on_start",
        "_since_s",
        "_times",
        "_wake_s",
        "context_tokens",
        "joined",
        "mark",
        "num_running",
        "reserved_tokens",
        "step_s",
        "waiting",
    )

    def __init__(
        self, kernel: Kernel, times: DecodeTimes, *, on_start: StartHook, on_done: Callable[[int], None]
    ) -> None:
        self._kernel, self._times, self._on_start, self._on_done = kernel, times, on_start, on_done
        self._max_batch = len(times.base_s) - 1
        self.mark = 0.0  # tokens every running request has made since the start of time
        self._since_s = 0.0
        self._floor_s = 0.0
        self.step_s = self._lone_step_s()
        self._heap: list[tuple[float, int]] = []
        self._num_removed = 0  # entries of the heap whose request has left before its end
        self.joined: dict[
            int, tuple[float, float, float]
        ] = {}  # request -> (mark at start, context, mark at end)
        self.waiting: deque[tuple[int, float, float]] = deque()
        self.num_running = 0
        self.context_tokens = 0.0
        self.reserved_tokens = 0.0
        self._wake_s = inf

    @property
    def batch_s(self) -> float:
        """What the running requests add to a step that reads the weights anyway: their contexts' reads."""
        return self._times.per_context_s * self.context_tokens

    def fits_ever(self, context_tokens: float, tokens: float) -> bool:
        """Whether an empty engine could take the request."""
        return context_tokens + tokens <= self._times.capacity_tokens

    def has_room(self, context_tokens: float, tokens: float) -> bool:
        """Whether a request would start at once."""
        return not self.waiting and self._fits(context_tokens, tokens)

    def _fits(self, context_tokens: float, tokens: float) -> bool:
        times, running = self._times, self.num_running
        if self.reserved_tokens + context_tokens + tokens > times.capacity_tokens:
            return False
        if not running:
            return True
        return running < self._max_batch and (
            times.base_s[running + 1] + times.per_context_s * (self.context_tokens + context_tokens)
            <= times.max_step_s
        )

    def extend_time_s(self, tokens: float, context_tokens: float) -> float:
        """Recomputing KV of ``tokens`` at the end of a context."""
        times = self._times
        return tokens * (times.extend_s + times.extend_per_context_s * context_tokens)

    def join(self, request: int, context_tokens: float, tokens: float) -> None:
        """Starts the request, or queues it in order of arrival."""
        if not self.waiting and self._fits(context_tokens, tokens):
            self._advance()
            self._start(request)
            self._reschedule()
        else:
            self.waiting.append((request, context_tokens, tokens))

    def made_tokens(self, request: int) -> float:
        """Tokens a running request has made so far."""
        self._advance()
        return max(0.0, self.mark - self.joined[request][0])

    def remove(self, request: int) -> None:
        """Takes a running request out; whoever waits may start."""
        self._advance()
        self._leave(request)
        self._num_removed += 1
        if self.waiting:
            self._admit()
        self._reschedule()

    def slow_to(self, floor_s: float) -> None:
        """A step takes at least so long from now on: the engine prefills as well; 0 when it has ended."""
        self._advance()
        self._floor_s = floor_s
        if not self.num_running:
            self.step_s = self._lone_step_s()
        self._reschedule()

    def _lone_step_s(self) -> float:
        return max(self._times.base_s[1], self._floor_s)

    def _advance(self) -> None:
        now = self._kernel.now_s
        running = self.num_running
        if running:
            gained = (now - self._since_s) / self.step_s
            self.mark += gained
            self.context_tokens += running * gained
        self._since_s = now

    def _start(self, request: int) -> None:
        on_start = self._on_start
        asked = on_start(request)
        if asked is None:
            return
        context, tokens, extend, hold_s = asked
        times, running = self._times, self.num_running
        if running and extend:
            # The others wait while the missing KV is recomputed in one mixed step.
            lost = extend * (times.extend_s + times.extend_per_context_s * context) / self.step_s
            self.mark -= lost
            self.context_tokens -= lost * running
        self.num_running = running = running + 1
        self.context_tokens = held = self.context_tokens + context
        self.reserved_tokens += context + tokens
        step = times.base_s[running] + times.per_context_s * held
        if step < self._floor_s:
            step = self._floor_s
        self.step_s = step
        begin = self.mark + hold_s / step
        end = begin + tokens
        self.joined[request] = (begin, context, end)
        heappush(self._heap, (end, request))

    def _leave(self, request: int) -> None:
        begin, context, end = self.joined.pop(request)
        self.num_running = running = self.num_running - 1
        if running:
            self.context_tokens -= context + (self.mark - begin)
            self.reserved_tokens -= context + end - begin
        else:
            self.context_tokens = self.reserved_tokens = 0.0  # ends the drift of rounding
            self.step_s = self._lone_step_s()

    def _admit(self) -> None:
        waiting = self.waiting
        while waiting and self._fits(waiting[0][1], waiting[0][2]):
            self._start(waiting.popleft()[0])

    def _reschedule(self) -> None:
        running = self.num_running
        if not running:
            return
        times, heap = self._times, self._heap
        step = times.base_s[running] + times.per_context_s * self.context_tokens
        if step < self._floor_s:
            step = self._floor_s
        self.step_s = step
        if self._num_removed:
            self._forget_removed()
        ends_s = self._since_s + (heap[0][0] - self.mark) * step
        # A wake-up that comes too early re-schedules itself, so only an earlier end needs a new event.
        if ends_s < self._wake_s:
            self._wake_s = ends_s
            self._kernel.at(ends_s, COMPLETION, self._wake, ends_s)

    def _forget_removed(self) -> None:
        heap, joined = self._heap, self.joined
        while heap:
            end, request = heap[0]
            entry = joined.get(request)
            if entry is not None and entry[2] == end:
                return
            heappop(heap)
            self._num_removed -= 1

    def _wake(self, scheduled_s: float) -> None:
        if scheduled_s != self._wake_s:
            return
        self._wake_s = inf
        self._advance()
        heap = self._heap
        mark = self.mark + 1e-6
        if not heap or heap[0][0] > mark:
            self._reschedule()  # woken too early: others joined since
            return
        done = []
        while heap and heap[0][0] <= mark:
            if self._num_removed:
                self._forget_removed()
                if not heap or heap[0][0] > mark:
                    break
            request = heappop(heap)[1]
            self._leave(request)
            done.append(request)
        if done and self.waiting:
            self._admit()
        self._reschedule()
        on_done = self._on_done
        for request in done:
            on_done(request)
