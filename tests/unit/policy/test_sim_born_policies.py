"""The policies that were tried in the simulator first."""

import pytest

from pdd.policy.affinity import CacheCandidate, place_near_cache
from pdd.policy.relay_threshold import RelayThresholdParams, relay_threshold_s


def test_the_cheapest_engine_takes_the_request() -> None:
    home, idle = CacheCandidate(id=7, wait_s=2.0, work_s=0.1), CacheCandidate(id=3, wait_s=0.0, work_s=1.5)
    assert place_near_cache((home, idle)).id == 3
    assert place_near_cache((home,)).reason == "only_candidate"
    with pytest.raises(ValueError, match="no candidate"):
        place_near_cache(())


def test_the_threshold_stretches_with_the_relays_load() -> None:
    params = RelayThresholdParams(stretch_ratio=4.0, relaxed_load_ratio=0.5)
    assert [
        relay_threshold_s(second_token_slo_s=0.5, relay_load_ratio=load, params=params)
        for load in (0.5, 0.75, 1.0)
    ] == [
        0.5,
        1.5,
        2.5,
    ]
    assert (
        relay_threshold_s(second_token_slo_s=0.5, relay_load_ratio=1.0, params=RelayThresholdParams()) == 0.5
    )
