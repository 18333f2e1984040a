"""The line's arithmetic: rate, delay, order, fairness and holding, without a socket or a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.link.line import MAX_CATCH_UP_S, End, Flow, Item, Line

RATE_BYTES_PER_S = 1_000_000.0
DELAY_S = 0.015


def line() -> Line:
    return Line(rate_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S)


def run(subject: Line, until_s: float) -> list[tuple[float, Flow, Item]]:
    """All deliveries up to a time, each with the time it happened at."""
    happened = []
    while (due_s := subject.next_event_s()) is not None and due_s <= until_s:
        happened += [(due_s, flow, item) for flow, item in subject.advance(due_s)]
    return happened


def size(item: Item) -> int:
    return 0 if isinstance(item, End) else len(item)


def test_a_byte_arrives_after_its_time_on_the_wire_and_the_delay() -> None:
    subject, flow = line(), Flow()
    subject.send(flow, b"x" * 1000, 10.0)
    [(when_s, _, item)] = run(subject, 20.0)
    assert when_s == pytest.approx(10.0 + 1000 / RATE_BYTES_PER_S + DELAY_S)
    assert size(item) == 1000
    assert flow.queued_bytes == 0


def test_a_backlog_moves_at_the_rate() -> None:
    subject, flow = line(), Flow()
    subject.send(flow, b"x" * 500_000, 0.0)
    happened = run(subject, 10.0)
    assert sum(size(item) for _, _, item in happened) == 500_000
    assert happened[-1][0] == pytest.approx(0.5 + DELAY_S)


def test_a_caller_that_wakes_late_loses_no_throughput() -> None:
    subject, flow = line(), Flow()
    subject.send(flow, b"x" * 500_000, 0.0)
    arrived, now_s = 0, 0.0
    while arrived < 500_000:
        now_s += 0.04
        arrived += sum(size(item) for _, item in subject.advance(now_s))
    assert now_s < 0.5 + DELAY_S + 0.04 + 1e-6


def test_a_process_that_was_stopped_makes_up_for_little() -> None:
    subject, flow = line(), Flow()
    subject.send(flow, b"x" * 500_000, 0.0)
    subject.advance(0.3)
    arrived = sum(size(item) for _, item in subject.advance(0.3 + DELAY_S))
    assert arrived <= (MAX_CATCH_UP_S + DELAY_S + 0.02) * RATE_BYTES_PER_S


def test_flows_with_a_backlog_get_equal_shares() -> None:
    subject = line()
    flows = [Flow(), Flow(), Flow()]
    for flow in flows:
        subject.send(flow, b"x" * 400_000, 0.0)
    shares = dict.fromkeys(flows, 0)
    for _, flow, item in run(subject, 0.6 + DELAY_S):
        shares[flow] += size(item)
    assert max(shares.values()) - min(shares.values()) <= 2 * 16 * 2**10


def test_a_small_message_does_not_wait_behind_a_bulk_flow() -> None:
    subject, bulk, small = line(), Flow(), Flow()
    subject.send(bulk, b"x" * 5_000_000, 0.0)
    subject.advance(0.001)
    subject.send(small, b"token", 0.001)
    when_s = next(when for when, flow, _ in run(subject, 5.0) if flow is small)
    assert when_s < 0.001 + DELAY_S + 2 * 16 * 2**10 / RATE_BYTES_PER_S


def test_ends_arrive_after_the_bytes_before_them() -> None:
    subject, flow = line(), Flow()
    for item in (b"a" * 40_000, b"b", End.EOF):
        subject.send(flow, item, 0.0)
    items = [item for _, _, item in run(subject, 5.0)]
    assert items[-1] is End.EOF
    assert b"".join(bytes(item) for item in items[:-1]) == b"a" * 40_000 + b"b"


def test_a_held_flow_stands_still_and_comes_back_in_order() -> None:
    subject, held, other = line(), Flow(), Flow()
    subject.send(held, b"1" * 20_000, 0.0)
    subject.advance(0.0)  # the first turn is on its way
    subject.hold(held)
    subject.send(held, b"2", 0.0)
    subject.send(other, b"o", 0.0)
    assert [flow for _, flow, _ in run(subject, 5.0)] == [other]
    subject.release(held, 5.0)
    items = [item for _, flow, item in run(subject, 10.0) if flow is held]
    assert b"".join(bytes(item) for item in items if not isinstance(item, End)) == b"1" * 20_000 + b"2"


def test_a_shorter_delay_does_not_let_bytes_overtake() -> None:
    subject, flow = line(), Flow()
    subject.send(flow, b"first", 0.0)
    subject.advance(0.0)
    subject.delay_s = 0.0
    subject.send(flow, b"second", 0.001)
    assert [bytes(item) for _, _, item in run(subject, 5.0) if not isinstance(item, End)] == [
        b"first",
        b"second",
    ]


def test_a_dropped_flow_delivers_nothing_more() -> None:
    subject, flow = line(), Flow()
    subject.send(flow, b"x" * 50_000, 0.0)
    subject.advance(0.0)
    subject.drop(flow)
    subject.send(flow, b"late", 0.0)
    assert run(subject, 5.0) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60_000), st.floats(0, 0.05)),
        min_size=1,
        max_size=40,
    )
)
def test_every_byte_arrives_once_in_order_and_never_too_early(sends: list[tuple[int, int, float]]) -> None:
    subject = line()
    flows = [Flow() for _ in range(4)]
    sent = dict.fromkeys(flows, b"")
    arrived = dict.fromkeys(flows, b"")
    now_s, total = 0.0, 0
    for number, (index, length, pause_s) in enumerate(sends):
        for when_s, flow, item in run(subject, now_s):
            assert when_s >= DELAY_S
            arrived[flow] += b"" if isinstance(item, End) else bytes(item)
        data = bytes([number % 256]) * length
        subject.send(flows[index], data, now_s)
        sent[flows[index]] += data
        total += length
        now_s += pause_s
    happened = run(subject, 1e9)
    for _, flow, item in happened:
        arrived[flow] += b"" if isinstance(item, End) else bytes(item)
    assert arrived == sent
    assert all(flow.queued_bytes == 0 for flow in flows)
    if happened:
        assert happened[-1][0] >= total / RATE_BYTES_PER_S + DELAY_S - 1e-9
