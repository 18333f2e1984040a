"""Each quick claim holds within its own tolerance; known misses are strict."""

import pytest

from pdd.sim.claims import Claim, cost_claims, kv_claims, prfaas_claims, queue_claims, wan_claims

MISSES = {
    "wan.p50": "measured 0.17 s against 0.248 s: the published flow cap and hit spread are not stated",
    "wan.p99": "measured 5.8 s against 18.9 s: the published flow cap and hit spread are not stated",
}


def _params(claims: list[Claim]) -> list[object]:
    return [
        pytest.param(
            claim,
            id=claim.id,
            marks=pytest.mark.xfail(strict=True, reason=MISSES[claim.id]) if claim.id in MISSES else (),
        )
        for claim in claims
    ]


@pytest.mark.parametrize("claim", _params([*kv_claims(), *cost_claims(), *prfaas_claims(), *wan_claims()]))
def test_claim_holds(claim: Claim) -> None:
    assert claim.holds, f"{claim.what}: expected {claim.expected:g}, measured {claim.measured:g}"


def test_queues_follow_theory_within_two_percent() -> None:
    missed = [claim for claim in queue_claims() if not claim.holds]
    assert not missed
