"""When a link may try again, without a link."""

import threading
from collections.abc import Callable

import pytest

from pdd.agent.backoff import Backoff, pause_after


def turns_that_end_by(backoff: Backoff, act: Callable[[], None]) -> list[bool]:
    """What a thread that waits for its turn is told because of the act; nothing if it waits on."""
    turns: list[bool] = []
    waiting = threading.Thread(target=lambda: turns.append(backoff.wait_for_turn()), daemon=True)
    waiting.start()
    act()
    waiting.join(timeout=60)
    return turns


def test_the_first_attempt_is_made_at_once() -> None:
    assert Backoff().wait_for_turn()


def test_no_attempt_is_made_after_close() -> None:
    backoff = Backoff()
    backoff.close()
    assert not backoff.wait_for_turn()


def test_who_waits_for_a_turn_is_told_that_there_will_be_none() -> None:
    backoff = Backoff()
    backoff.wait_for_turn()
    backoff.num_failures = 10
    assert turns_that_end_by(backoff, backoff.close) == [False]


def test_the_third_failure_in_a_row_opens_the_breaker() -> None:
    backoff, is_open = Backoff(), []
    for backoff.num_failures in range(5):
        is_open.append(backoff.is_breaker_open)
    assert is_open == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("num_failures", "pause_s"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (2000, 5.0)]
)
def test_attempts_that_fail_are_made_less_often(num_failures: int, pause_s: float) -> None:
    assert pause_after(num_failures, is_urgent=False) == pause_s


@pytest.mark.parametrize("num_failures", [0, 1, 4, 2000])
def test_news_bring_the_next_attempt_forward_but_not_below_a_second(num_failures: int) -> None:
    assert pause_after(num_failures, is_urgent=True) == 1.0


def test_who_waits_hears_the_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.agent.backoff._MAX_RETRY_S", 3600.0)
    monkeypatch.setattr("pdd.agent.backoff._MIN_RETRY_S", 0.05)
    backoff = Backoff()
    backoff.num_failures = 17
    assert backoff.wait_for_turn()
    assert turns_that_end_by(backoff, backoff.hurry) == [True]
