"""Where a run takes a short cut, the policy would have said the same."""

from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.affinity import CacheCandidate, place_near_cache
from pdd.policy.placement import place
from pdd.policy.snapshot import EngineView


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_the_least_loaded_engine_is_the_one_placement_puts_first(loads: list[int]) -> None:
    views = [
        EngineView(id=f"{index:03d}", healthy=True, running=load, capacity=50)
        for index, load in enumerate(loads)
    ]
    assert int(place(views).order[0]) == loads.index(min(loads))


@given(
    home=st.integers(0, 40),
    other=st.integers(0, 40),
    home_work_s=st.floats(0, 5),
    more_s=st.floats(0.001, 5),
    other_wait_s=st.floats(0, 5),
)
def test_a_home_with_room_and_less_to_send_is_what_affinity_says(
    home: int, other: int, home_work_s: float, more_s: float, other_wait_s: float
) -> None:
    decision = place_near_cache(
        (
            CacheCandidate(id=home, wait_s=0.0, work_s=home_work_s),
            CacheCandidate(id=other, wait_s=other_wait_s, work_s=home_work_s + more_s),
        )
    )
    assert decision.id == home
