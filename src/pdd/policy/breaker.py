"""Whether an engine that failed lately is asked again: a circuit breaker, as a table of three states.

Closed: asked like any other. Open, after ``failures`` failures in a row: asked only when no other is left,
so a breaker delays nobody for long and never is the reason of an error. Half-open, ``open_s`` later: one
request at a time is a trial; its success closes the breaker, its failure opens it anew.

Example:
    ``failures`` 3, ``open_s`` 10: an engine that answered 500 three times in a row gets no request for 10 s
    while another one is healthy, then one.
"""

from dataclasses import dataclass, replace
from typing import Literal

BreakerView = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerParams:
    """Parameters; ``RouterConfig`` explains each."""

    failures: int
    open_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """What is remembered of one engine: failures in a row, and when they became too many."""

    failures: int = 0
    opened_s: float | None = None

    def after_success(self) -> "Breaker":
        """Closed, whatever it was."""
        return Breaker()

    def after_failure(self, *, now_s: float, params: BreakerParams) -> "Breaker":
        """One more failure; open if that is too many."""
        failures = self.failures + 1
        if failures < params.failures:
            return replace(self, failures=failures)
        return Breaker(failures=failures, opened_s=now_s)

    def view(self, *, now_s: float, params: BreakerParams) -> BreakerView:
        """What it is now."""
        if self.opened_s is None:
            return "closed"
        return "half-open" if now_s - self.opened_s >= params.open_s else "open"
