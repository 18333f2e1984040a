import pytest

from pdd.policy.coding import CodingParams, CodingSnapshot, decide_coding


@pytest.mark.parametrize(
    ("line", "coder", "ratio", "is_coded", "reason"),
    [
        (125e6, 400e6, 1.48, True, "line_is_slower"),
        (400e6, 400e6, 1.48, False, "coder_is_slower"),
        (300e6, 400e6, 1.48, True, "line_is_slower"),  # the coder is the slower of the two, and still faster
        (125e6, 400e6, 1.02, False, "does_not_compress"),
        (None, 400e6, 1.48, False, "not_measured"),
        (125e6, None, None, False, "not_measured"),
    ],
)
def test_coded_where_it_crosses_faster(
    line: float | None, coder: float | None, ratio: float | None, is_coded: bool, reason: str
) -> None:
    snapshot = CodingSnapshot(line_rate_bytes_per_s=line, coder_rate_bytes_per_s=coder, ratio=ratio)
    decision = decide_coding(snapshot, CodingParams())
    assert (decision.is_coded, decision.reason) == (is_coded, reason)
