"""When a link may try again, without a link."""

import threading

from pdd.agent.backoff import Backoff


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
    turns: list[bool] = []
    waiting = threading.Thread(target=lambda: turns.append(backoff.wait_for_turn()))
    waiting.start()
    backoff.close()
    waiting.join(timeout=10)
    assert turns == [False]


def test_the_third_failure_in_a_row_opens_the_breaker() -> None:
    backoff, is_open = Backoff(), []
    for backoff.num_failures in range(5):
        is_open.append(backoff.is_breaker_open)
    assert is_open == [False, False, False, True, True]
