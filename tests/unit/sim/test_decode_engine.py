"""The fluid decode engine: rates, admission, removal, holds."""

import pytest

from pdd.sim.decode_engine import Admission, DecodeEngine, DecodeTimes
from pdd.sim.kernel import ARRIVAL, Kernel


def _engine(
    kernel: Kernel, asked: dict[int, Admission], ends: dict[int, float], times: DecodeTimes
) -> DecodeEngine:
    return DecodeEngine(
        kernel, times, on_start=asked.get, on_done=lambda request: ends.setdefault(request, kernel.now_s)
    )


TIMES = DecodeTimes(base_s=[0.0, 0.1, 0.1, 0.1], per_context_s=0.0, capacity_tokens=100.0)


def test_requests_gain_tokens_at_one_rate() -> None:
    kernel, ends = Kernel(), {}
    asked = {index: (10.0, float(tokens), 0.0, 0.0) for index, tokens in enumerate((10, 20))}
    engine = _engine(kernel, asked, ends, TIMES)
    for index in asked:
        engine.join(index, 10, asked[index][1])
    kernel.run()
    assert ends == {0: pytest.approx(1.0), 1: pytest.approx(2.0)}
    assert engine.context_tokens == engine.reserved_tokens == 0


def test_memory_makes_requests_wait_in_order() -> None:
    kernel, ends = Kernel(), {}
    asked = dict.fromkeys(range(3), (40.0, 10.0, 0.0, 0.0))
    engine = _engine(kernel, asked, ends, TIMES)
    for index in asked:
        engine.join(index, 40, 10)
    assert (engine.num_running, len(engine.waiting)) == (2, 1)
    kernel.run()
    assert ends[2] == pytest.approx(2.0)


def test_time_per_token_bounds_admission() -> None:
    kernel, ends = Kernel(), {}
    times = DecodeTimes(base_s=[0.0, 0.1, 0.2, 0.3], per_context_s=0.0, capacity_tokens=1e9, max_step_s=0.2)
    asked = dict.fromkeys(range(3), (1.0, 10.0, 0.0, 0.0))
    engine = _engine(kernel, asked, ends, times)
    for index in asked:
        engine.join(index, 1, 10)
    assert engine.num_running == 2


def test_a_removed_request_tells_its_tokens_and_lets_the_next_in() -> None:
    kernel, ends = Kernel(), {}
    asked = dict.fromkeys(range(2), (60.0, 10.0, 0.0, 0.0))
    engine = _engine(kernel, asked, ends, TIMES)
    engine.join(0, 60, 10)
    engine.join(1, 60, 10)
    made: list[float] = []

    def leave(_: None) -> None:
        made.append(engine.made_tokens(0))
        engine.remove(0)

    kernel.at(0.5, ARRIVAL, leave)
    kernel.run()
    assert made == [pytest.approx(5.0)]
    assert ends == {1: pytest.approx(1.5)}


def test_a_hold_takes_a_place_before_the_first_token() -> None:
    kernel, ends = Kernel(), {}
    engine = _engine(kernel, {0: (1.0, 10.0, 0.0, 0.5)}, ends, TIMES)
    engine.join(0, 1, 10)
    kernel.run()
    assert ends == {0: pytest.approx(1.5)}


def test_a_request_that_is_no_longer_wanted_takes_no_place() -> None:
    kernel, ends = Kernel(), {}
    engine = DecodeEngine(kernel, TIMES, on_start=lambda _: None, on_done=lambda _: None)
    engine.join(0, 1, 10)
    kernel.run()
    assert engine.num_running == 0
    assert not ends


def test_an_engine_that_also_prefills_makes_a_token_a_chunk_meanwhile() -> None:
    kernel, ends = Kernel(), {}
    engine = _engine(kernel, {0: (1.0, 10.0, 0.0, 0.0)}, ends, TIMES)
    engine.join(0, 1, 10)
    kernel.at(0.3, ARRIVAL, engine.slow_to, 0.5)  # three tokens made
    kernel.at(1.3, ARRIVAL, engine.slow_to, 0.0)  # two more in a second of chunks
    kernel.run()
    assert ends == {0: pytest.approx(1.8)}
