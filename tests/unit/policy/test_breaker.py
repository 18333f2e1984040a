"""The circuit breaker's three states."""

from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.breaker import Breaker, BreakerParams
from pdd.policy.placement import place
from pdd.policy.snapshot import EngineView

PARAMS = BreakerParams(failures=3, open_s=10.0)


def failed(times: int, *, now_s: float = 0.0) -> Breaker:
    """A breaker after so many failures in a row."""
    breaker = Breaker()
    for _ in range(times):
        breaker = breaker.after_failure(now_s=now_s, params=PARAMS)
    return breaker


def test_it_opens_after_failures_in_a_row_and_tries_again_later() -> None:
    assert failed(2).view(now_s=0.0, params=PARAMS) == "closed"
    assert failed(3).view(now_s=9.9, params=PARAMS) == "open"
    assert failed(3).view(now_s=10.0, params=PARAMS) == "half-open"


def test_a_trial_that_fails_opens_it_anew_and_one_that_succeeds_closes_it() -> None:
    again = failed(3).after_failure(now_s=10.0, params=PARAMS)
    assert again.view(now_s=19.9, params=PARAMS) == "open"
    assert failed(3).after_success() == Breaker()


@given(st.lists(st.booleans()))
def test_only_failures_in_a_row_count(outcomes: list[bool]) -> None:
    breaker, in_a_row = Breaker(), 0
    for is_good in outcomes:
        breaker = breaker.after_success() if is_good else breaker.after_failure(now_s=0.0, params=PARAMS)
        in_a_row = 0 if is_good else in_a_row + 1
        assert (breaker.view(now_s=0.0, params=PARAMS) == "open") == (in_a_row >= PARAMS.failures)


def test_an_open_breaker_comes_last_but_is_no_reason_to_refuse() -> None:
    tripped = EngineView(id="p0", healthy=True, running=0, capacity=8, tripped=True)
    busy = EngineView(id="p1", healthy=True, running=7, capacity=8)
    assert place([tripped, busy]).order == ("p1", "p0")
    assert place([tripped]).order == ("p0",)
