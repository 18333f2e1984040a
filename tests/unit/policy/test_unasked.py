import pytest

from pdd.policy.unasked import UnaskedParams, UnaskedSnapshot, decide_unasked, is_worth_sending

PARAMS = UnaskedParams()
MIB = 2**20


def snapshot(**changes: float | None) -> UnaskedSnapshot:
    values: dict[str, float | None] = {
        "rtt_s": 0.03,
        "rate_bytes_per_s": 120e6,
        "outstanding_bytes": 0,
        "unasked_bytes": 0,
        "credit_bytes": 16 * MIB,
        "chunk_bytes": MIB,
    }
    return UnaskedSnapshot(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "num_chunks", "reason"),
    [
        ({}, 3, "window"),  # 3.4 MiB cross in a round trip
        ({"outstanding_bytes": 2 * MIB}, 1, "window"),
        ({"outstanding_bytes": 3 * MIB}, 0, "line_is_busy"),
        ({"credit_bytes": 2 * MIB}, 2, "window"),
        ({"credit_bytes": 2 * MIB, "unasked_bytes": MIB, "outstanding_bytes": MIB}, 1, "window"),
        ({"credit_bytes": MIB - 1}, 0, "no_credit"),
        ({"rate_bytes_per_s": None}, 1, "window"),  # a chunk is always worth its round trip
        ({"rate_bytes_per_s": 1e6}, 1, "window"),
        ({"rtt_s": None}, 0, "near"),
        ({"rtt_s": 0.001}, 0, "near"),
    ],
)
def test_as_much_as_crosses_until_the_answer(
    changes: dict[str, float | None], num_chunks: int, reason: str
) -> None:
    decision = decide_unasked(snapshot(**changes), PARAMS)
    assert (decision.num_chunks, decision.reason) == (num_chunks, reason)


def test_only_what_is_almost_surely_lacking() -> None:
    assert is_worth_sending(1.0, PARAMS)
    assert is_worth_sending(0.98, PARAMS)
    assert not is_worth_sending(0.97, PARAMS)
