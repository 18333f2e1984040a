"""One minute of the soak; ``make soak`` runs thirty."""

import pytest
from tests.kit.soak import soak


@pytest.mark.soak
@pytest.mark.timeout(180)
async def test_a_minute_of_mixed_traffic_and_random_trouble_ends_every_answer_exactly_once() -> None:
    report = await soak(duration_s=60.0, seed=7)
    assert report.violations == []
    assert report.ends["complete"] > 20
    assert report.ends["cancelled"] > 0
    assert len(report.num_faults) >= 6
    assert report.lane_tokens > 1000
