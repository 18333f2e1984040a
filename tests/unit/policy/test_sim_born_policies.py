"""The policies that were tried in the simulator first."""

import pytest

from pdd.policy.affinity import CacheCandidate, place_near_cache
from pdd.policy.outlier import decide_outlier
from pdd.policy.relay_threshold import RelayThresholdParams, relay_threshold_s
from pdd.policy.wan_order import TransferView, WanOrderParams, transfer_rank_s

SHORTEST = WanOrderParams(order="shortest-unmasked-first", patience_ratio=10.0, masked_grace_s=5.0)


def test_the_documented_example_of_the_order() -> None:
    masked = TransferView(enqueued_s=10.0, transfer_s=2.0, masked=True)
    assert transfer_rank_s(masked, SHORTEST) == 35.0
    assert transfer_rank_s(TransferView(enqueued_s=30.0, transfer_s=0.1, masked=False), SHORTEST) == 31.0
    assert transfer_rank_s(TransferView(enqueued_s=35.0, transfer_s=0.1, masked=False), SHORTEST) > 35.0


def test_a_full_relay_wants_its_transfers_as_soon_as_unmasked_ones() -> None:
    full = TransferView(enqueued_s=1.0, transfer_s=1.0, masked=True, relay_load_ratio=1.0)
    assert transfer_rank_s(full, SHORTEST) == transfer_rank_s(
        TransferView(enqueued_s=1.0, transfer_s=1.0, masked=False), SHORTEST
    )


def test_first_come_ignores_everything_else() -> None:
    view = TransferView(enqueued_s=3.0, transfer_s=99.0, masked=True)
    assert transfer_rank_s(view, WanOrderParams(order="first-come")) == 3.0


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


def test_an_outlier_ends_before_it_lands() -> None:
    assert decide_outlier(output_bound_tokens=300, relay_tokens_per_s=40, predicted_wan_s=9.0).hold
    assert not decide_outlier(output_bound_tokens=300, relay_tokens_per_s=40, predicted_wan_s=7.0).hold
