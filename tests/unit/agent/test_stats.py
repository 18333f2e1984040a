import sys
import threading
from collections.abc import Iterator

import pytest

from pdd.agent.stats import LossMeter, RateMeter, RoundTrip

MB = 10**6


def test_a_rate_needs_enough_bytes() -> None:
    meter = RateMeter()
    meter.busy(0.0)
    meter.acknowledged(1000, is_drained=True, now_s=0.5)
    assert meter.rate_bytes_per_s is None


def test_the_first_window_is_the_rate() -> None:
    meter = RateMeter()
    meter.busy(10.0)
    meter.acknowledged(MB, is_drained=False, now_s=10.05)
    assert meter.rate_bytes_per_s is None
    meter.acknowledged(MB, is_drained=False, now_s=10.2)
    assert meter.rate_bytes_per_s == pytest.approx(10 * MB)


def test_the_rate_follows_the_line_within_seconds() -> None:
    meter = RateMeter()
    now_s = 0.0
    meter.busy(now_s)
    for rate_mb in (100, 10):
        for _ in range(50):
            now_s += 0.1
            meter.acknowledged(rate_mb * MB // 10, is_drained=False, now_s=now_s)
        assert meter.rate_bytes_per_s == pytest.approx(rate_mb * MB, rel=0.1)


def test_idle_time_does_not_count() -> None:
    meter = RateMeter()
    meter.busy(0.0)
    meter.acknowledged(10 * MB, is_drained=True, now_s=1.0)
    meter.busy(100.0)
    meter.acknowledged(10 * MB, is_drained=True, now_s=101.0)
    assert meter.rate_bytes_per_s == pytest.approx(10 * MB)
    meter.busy(200.0)
    meter.idle()
    meter.acknowledged(10 * MB, is_drained=True, now_s=300.0)
    assert meter.rate_bytes_per_s == pytest.approx(10 * MB)


def test_an_answer_in_front_of_the_first_bytes_does_not_make_the_line_faster() -> None:
    meter = RateMeter()
    meter.busy(0.0)
    meter.acknowledged(0, is_drained=False, now_s=0.16)
    meter.acknowledged(2 * MB, is_drained=True, now_s=0.17)
    assert meter.rate_bytes_per_s == pytest.approx(2 * MB / 0.17)


def test_what_was_sent_in_vain_ends_the_window() -> None:
    meter = RateMeter()
    meter.busy(0.0)
    meter.acknowledged(0, is_drained=True, now_s=0.05)
    meter.acknowledged(MB, is_drained=True, now_s=0.1)
    assert meter.rate_bytes_per_s is None


def test_a_round_trip_is_known_after_one_pong() -> None:
    trip = RoundTrip()
    nonce = trip.ping(10.0)
    assert trip.oldest_unanswered_s == 10.0
    trip.pong(nonce + 1, 10.1)
    assert trip.rtt_s is None
    trip.pong(nonce, 10.03)
    assert trip.rtt_s == pytest.approx(0.03)
    assert trip.oldest_unanswered_s is None


def test_pings_behind_bulk_data_do_not_make_the_line_longer() -> None:
    trip = RoundTrip()
    for second, rtt_s in enumerate([0.031, 0.4, 0.9, 0.032, 0.7]):
        trip.pong(trip.ping(second), second + rtt_s)
    assert trip.rtt_s == pytest.approx(0.031)


def test_a_longer_route_is_believed_once_the_window_has_passed() -> None:
    trip = RoundTrip()
    trip.pong(trip.ping(0.0), 0.03)
    for second in (30.0, 59.0):
        trip.pong(trip.ping(second), second + 0.08)
    assert trip.rtt_s == pytest.approx(0.03)
    trip.pong(trip.ping(61.0), 61.08)
    assert trip.rtt_s == pytest.approx(0.08)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns as often as the interpreter lets them."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("eager_threads")
def test_a_round_trip_that_is_known_stays_known_while_answers_come() -> None:
    trip = RoundTrip()
    trip.pong(trip.ping(0.0), 1.0)
    is_read = threading.Event()

    def answer() -> None:
        while not is_read.is_set():
            trip.pong(trip.ping(0.0), 1.0)

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    try:
        seen = {(trip.rtt_s, trip.oldest_unanswered_s in (None, 0.0)) for _ in range(20_000)}
    finally:
        is_read.set()
        answering.join()
    assert seen == {(1.0, True)}


def test_loss_is_the_part_sent_again_of_enough_segments() -> None:
    loss = LossMeter()
    loss.update(500, 100)
    assert loss.ratio is None
    loss.update(4000, 40)
    assert loss.ratio == pytest.approx(0.01)
    loss.update(5000, 1000)  # too few since
    assert loss.ratio == pytest.approx(0.01)
    loss.update(8000, 40)
    assert loss.ratio == pytest.approx(0.0075)


def test_a_new_session_counts_from_zero() -> None:
    loss = LossMeter()
    loss.update(100_000, 1000)
    loss.update(10, 0)
    loss.update(2010, 0)
    assert loss.ratio == pytest.approx(0.0075)
