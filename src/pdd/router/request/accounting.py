"""Keeps one request's record and the metrics that follow from it."""

from array import array
from collections.abc import Mapping
from statistics import median

from pdd.router.engines import WireUsage
from pdd.router.fastpath.lanes import News
from pdd.router.metrics import RouterMetrics
from pdd.router.records import Record
from pdd.router.request.events import Failure, StartDecode
from pdd.router.request.machine.table import RequestMachine

MAX_GAPS = 512
"""The median gap of an answer is that of its first so many: a handoff comes early."""
LOT_TOKENS = 32
"""Tokens of one answer are counted together: a labelled counter costs as much as all the rest of a token."""


class Accounting:
    """Writes what the client experienced into the record, and counts it.

    Args:
        record: Written to.
        metrics: Counted in.
        arrived_s: When the request came, on the loop's clock; other times are since then.
    """

    def __init__(self, *, record: Record, metrics: RouterMetrics, arrived_s: float) -> None:
        self._record = record
        self._arrived_s = arrived_s
        self._metrics = metrics
        self._last_token_s: float | None = None
        self._joined_s: float | None = None
        self._gaps_s = array("d")
        self._relay_gap_s = 0.0
        self._relay_tokens = 0
        self._last_role = ""
        self._main_first_cached: int | None = None
        self._main_prompt_tokens = 0
        self._role = ""
        self._uncounted = 0

    def on_decode(self, effect: StartDecode, machine: RequestMachine, now_s: float) -> None:
        """A decode engine is asked to go on; at a handoff this is where the client's stall begins."""
        if effect.role == "main":
            self._record.main = effect.engine
        else:
            self._record.relay = effect.engine
        if effect.role == "main" and machine.handoff_mode is not None and self._record.handoff_s is None:
            self._record.handoff_s = now_s
            self._joined_s = self._last_token_s

    def on_more(self, now_s: float, count: int, role: str) -> bool:
        """``on_tokens`` where nothing changes but numbers; false if it is to be called."""
        if role != "main" or self._uncounted >= LOT_TOKENS or not self.is_steady(role):
            return False
        record, last_s = self._record, self._last_token_s
        if last_s is None or record.max_itl_s is None:
            return False
        self._uncounted += count
        record.output_tokens += count
        if now_s - last_s > record.max_itl_s:
            record.max_itl_s = now_s - last_s
        self._last_token_s = now_s
        return True

    def is_steady(self, role: str) -> bool:
        """Whether the role's next token changes nothing but numbers."""
        settled = self._joined_s is None and self._record.max_itl_s is not None
        return settled and self._role == self._last_role == role

    @property
    def last_token_s(self) -> float:
        """When the last token was given, on the loop's clock."""
        return self._arrived_s + (self._last_token_s or 0.0)

    def on_given(self, news: News) -> None:
        """Tokens were given to the client by a lane, which begins where all is steady."""
        record, count = self._record, len(news.ids)
        last_s = news.last_s - self._arrived_s
        self._uncounted += count
        record.output_tokens += count
        record.max_itl_s = max(record.max_itl_s or 0.0, news.max_gap_s)
        self._gaps_s.extend(news.gaps_s[: MAX_GAPS - len(self._gaps_s)])
        if self._role == "relay":
            self._relay_gap_s += last_s - (self._last_token_s or 0.0)
            self._relay_tokens += count
        self._last_token_s = last_s
        self._count_lot()

    def on_tokens(self, now_s: float, count: int, role: str) -> None:
        """Tokens are given to the client."""
        record = self._record
        if not count:
            return
        if role != self._role or self._uncounted >= LOT_TOKENS:
            self._count_lot()
            self._role = role
        self._uncounted += count
        record.output_tokens += count
        if record.ttft_s is None:
            record.ttft_s = now_s
        if record.second_token_s is None and record.output_tokens >= 2:
            record.second_token_s = now_s
        if self._last_token_s is not None:
            gap_s = now_s - self._last_token_s
            if record.max_itl_s is None or gap_s > record.max_itl_s:
                record.max_itl_s = gap_s
            if len(self._gaps_s) < MAX_GAPS:
                self._gaps_s.append(gap_s)
            if role == "relay" and self._last_role == role:
                self._relay_gap_s += gap_s
                self._relay_tokens += count
            if role == "main" and self._joined_s is not None:
                record.stall_s = now_s - self._joined_s
                self._joined_s = None
        self._last_token_s = now_s
        self._last_role = role

    @property
    def relay_itl_s(self) -> float | None:
        """RLD's mean time for one token of this answer, if it made some."""
        return self._relay_gap_s / self._relay_tokens if self._relay_tokens else None

    def _count_lot(self) -> None:
        if self._uncounted:
            self._metrics.output_tokens.labels(role=self._role).inc(self._uncounted)
            self._uncounted = 0

    def on_prefill_hit(self, engine: str, believed_held_tokens: Mapping[str, int]) -> None:
        """P has said how much of the prompt it found; what was believed is compared with it."""
        if (believed := believed_held_tokens.get(engine)) is None:
            return
        self._record.predicted_cached_tokens = believed
        self._metrics.prefill_hit_error.labels(engine=engine).observe(
            abs(believed - self._record.cached_tokens)
        )

    def on_usage(self, role: str, engine: str, usage: WireUsage, *, expected_tokens: int) -> int:
        """What a decode engine found in its caches; returns the tokens it should have found and did not."""
        cached = usage.cached_tokens
        if cached is None:
            return 0
        shortfall = max(0, expected_tokens - cached)
        if shortfall:
            self._record.shortfall_tokens += shortfall
            self._metrics.shortfall_tokens.labels(engine=engine).inc(shortfall)
        if role == "main":
            # Catch-up asks several times; what MD had to compute is all that its first look did not find.
            if self._main_first_cached is None:
                self._main_first_cached = cached
            self._record.md_cached_tokens = self._main_first_cached
            self._record.md_recomputed_tokens = usage.prompt_tokens - self._main_first_cached
        return shortfall

    def on_end(
        self, machine: RequestMachine, *, failure: Failure | None, num_tokens: int, now_s: float
    ) -> None:
        """The request is over: the record is final, but for bytes of a cancelled transfer still in flight."""
        self._count_lot()
        record, metrics = self._record, self._metrics
        record.outcome = machine.outcome
        record.error = failure.kind if failure else None
        record.failures = [f"{f.kind}: {f.message}" for f in machine.failures]
        record.attempts = machine.attempt
        record.output_tokens = num_tokens
        record.finished_s = now_s
        record.median_itl_s = median(self._gaps_s) if self._gaps_s else None
        record.eager_tokens = machine.eager_tokens
        record.handoff_mode = machine.handoff_mode
        record.handoff_rounds = machine.handoff_rounds
        path = record.pipeline or "none"
        metrics.requests.labels(path=path, outcome=record.outcome or "error").inc()
        metrics.prompt_tokens.inc(record.prompt_tokens)
        for value, histogram in (
            (record.ttft_s, metrics.ttft_s),
            (record.second_token_s, metrics.second_token_s),
            (record.max_itl_s, metrics.max_itl_s),
        ):
            if value is not None:
                histogram.labels(path=path).observe(value)
        if record.outlier:
            ended = "relay" if machine.outcome == "complete" else "ended"
            metrics.outliers.labels(result="resumed" if machine.was_resumed else ended).inc()
        if record.handoff_mode is not None:
            self._count_handoff(record.handoff_mode)

    def _count_handoff(self, mode: str) -> None:
        record, metrics = self._record, self._metrics
        metrics.handoffs.labels(mode=mode).inc()
        metrics.eager_tokens.observe(record.eager_tokens)
        if record.handoff_rounds:
            metrics.handoff_rounds.observe(record.handoff_rounds)
        if record.stall_s is not None:
            metrics.handoff_stall_s.labels(mode=mode).observe(record.stall_s)
        if record.md_recomputed_tokens is not None:
            metrics.recomputed_tokens.inc(record.md_recomputed_tokens)
