"""The fluid line conserves bytes, honours caps, pool and order, and forgets what is cancelled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.policy.wan_order import OrderParams
from pdd.sim.kernel import ARRIVAL, Kernel
from pdd.sim.line import Flow, Line, LineProfile, loss_limited_bytes_per_s

FIRST_COME = OrderParams(order="first-come")
SHORTEST = OrderParams(ageing_s=10.0)


def _line(kernel: Kernel, *, pool: int, flow: float, order: OrderParams = FIRST_COME) -> Line:
    return Line(
        kernel, LineProfile(rate_bytes_per_s=100.0, rtt_s=0.0, flow_bytes_per_s=flow, pool=pool), order
    )


def _play(
    sends: list[tuple[float, float, bool]], *, pool: int, flow: float, order: OrderParams = FIRST_COME
) -> dict[int, float]:
    kernel = Kernel()
    line = _line(kernel, pool=pool, flow=flow, order=order)
    ends: dict[int, float] = {}

    def send(index: int) -> None:
        _, size, masked = sends[index]
        line.send(
            index,
            size,
            is_unmasked=not masked,
            on_done=lambda done: ends.setdefault(done, kernel.now_s),
        )

    for index, (at, _, _) in enumerate(sends):
        kernel.at(at, ARRIVAL, send, index)
    kernel.run()
    return ends


def test_a_lone_flow_moves_at_its_cap() -> None:
    assert _play([(0.0, 100.0, False)], pool=4, flow=25.0) == {0: pytest.approx(4.0)}


def test_flows_share_the_rate() -> None:
    ends = _play([(0.0, 100.0, False), (0.0, 100.0, False)], pool=4, flow=100.0)
    assert ends == {0: pytest.approx(2.0), 1: pytest.approx(2.0)}


def test_first_come_waits_and_shortest_overtakes() -> None:
    sends = [(0.0, 1_000.0, False), (1.0, 10.0, False)]
    assert _play(sends, pool=1, flow=100.0)[1] == pytest.approx(10.1)
    assert _play(sends, pool=1, flow=100.0, order=SHORTEST)[1] == pytest.approx(1.1)


def test_unmasked_go_before_masked() -> None:
    sends = [(0.0, 500.0, True), (1.0, 500.0, False)]
    ends = _play(sends, pool=1, flow=100.0, order=SHORTEST)
    assert ends[1] == pytest.approx(6.0)
    assert ends[0] == pytest.approx(10.0)


def test_a_cancelled_flow_frees_the_line_at_once() -> None:
    kernel = Kernel()
    line = _line(kernel, pool=1, flow=100.0)
    ends: list[int] = []
    flows: list[Flow] = [line.send(index, 1_000.0, on_done=ends.append) for index in range(2)]
    kernel.at(2.0, ARRIVAL, lambda _: line.cancel(flows[0]))
    kernel.run()
    assert ends == [1]
    assert kernel.now_s == pytest.approx(12.0)
    assert line.sent_bytes == pytest.approx(1_200.0)


@settings(max_examples=80, deadline=None)
@given(
    sends=st.lists(st.tuples(st.floats(0, 50), st.floats(1, 2_000), st.booleans()), min_size=1, max_size=20),
    pool=st.integers(1, 6),
    flow=st.floats(10, 100),
    shortest=st.booleans(),
)
def test_every_flow_ends_and_none_is_faster_than_its_cap(
    sends: list[tuple[float, float, bool]], pool: int, flow: float, shortest: bool
) -> None:
    ends = _play(sends, pool=pool, flow=flow, order=SHORTEST if shortest else FIRST_COME)
    assert set(ends) == set(range(len(sends)))
    for index, (at, size, _) in enumerate(sends):
        assert ends[index] >= at + size / flow - 1e-6
    total = sum(size for _, size, _ in sends)
    assert max(ends.values()) >= min(at for at, _, _ in sends) + total / 100.0 - 1e-6


def test_a_long_clock_does_not_wake_for_ever() -> None:
    kernel = Kernel()
    line = Line(
        kernel, LineProfile(rate_bytes_per_s=12.5e9, rtt_s=0.0, flow_bytes_per_s=1e9, pool=32), FIRST_COME
    )
    ends: list[int] = []
    for index in range(200):
        kernel.at(
            1e5 + index * 0.37,
            ARRIVAL,
            lambda i: line.send(i, 3.3e8 + i * 7.7, on_done=ends.append),
            index,
        )
    kernel.run()
    assert len(ends) == 200
    assert kernel.events < 2_000


def test_loss_bounds_a_stream() -> None:
    assert loss_limited_bytes_per_s(rtt_s=0.056, loss_ratio=1e-5) == pytest.approx(
        1460 / 0.056 * 387.3, rel=1e-3
    )
    assert loss_limited_bytes_per_s(rtt_s=0.056, loss_ratio=0.0) == float("inf")
