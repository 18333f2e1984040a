"""The order on a link: who goes first, and that everybody goes at last."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.wan_order import OrderParams, WaitingTransfer, choose_next, transfer_rank_s

PARAMS = OrderParams(ageing_s=5.0)
MIB = 2**20


def transfer(number: int, **changes: Any) -> WaitingTransfer:
    values: dict[str, Any] = {
        "number": number,
        "begun": number,
        "remaining_bytes": 10 * MIB,
        "since_s": 0.0,
    }
    return WaitingTransfer(**(values | changes))


def chosen(*waiting: WaitingTransfer) -> tuple[int, str]:
    decision = choose_next(waiting, PARAMS)
    return (decision.number, decision.reason) if decision is not None else (-1, "none")


def test_unmasked_goes_before_masked_before_outlier() -> None:
    outlier = transfer(1, priority=-1)
    masked = transfer(2)
    unmasked = transfer(3, is_unmasked=True)
    assert chosen(outlier, masked, unmasked) == (3, "unmasked")
    assert chosen(outlier, masked) == (2, "masked")
    assert chosen(outlier) == (1, "outlier")


def test_the_shortest_remaining_goes_first_and_then_who_began_first() -> None:
    assert chosen(transfer(1, remaining_bytes=20), transfer(2, remaining_bytes=10)) == (2, "masked")
    assert chosen(transfer(2), transfer(1)) == (1, "masked")


def test_a_masked_transfer_counts_for_64_times_its_length_and_a_full_relays_for_its_own() -> None:
    unmasked = transfer(1, is_unmasked=True, remaining_bytes=65 * MIB)
    assert chosen(unmasked, transfer(2, remaining_bytes=MIB))[0] == 2
    assert chosen(unmasked, transfer(2, remaining_bytes=2 * MIB))[0] == 1
    assert chosen(unmasked, transfer(2, remaining_bytes=64 * MIB, priority=100))[0] == 2


def test_held_never_goes() -> None:
    assert chosen(transfer(1, is_held=True)) == (-1, "none")
    assert chosen(transfer(1, is_held=True, is_unmasked=True, since_s=-1e6), transfer(2)) == (2, "masked")
    assert chosen() == (-1, "none")


def test_the_documented_example() -> None:
    masked = transfer(1, since_s=10.0, remaining_bytes=2**26)
    assert transfer_rank_s(
        since_s=10.0, remaining_bytes=2**26, priority=0, is_unmasked=False, params=PARAMS
    ) == pytest.approx(170.0)
    assert chosen(masked, transfer(2, is_unmasked=True, since_s=60.0, remaining_bytes=2**20))[0] == 2
    assert chosen(masked, transfer(2, is_unmasked=True, since_s=75.0, remaining_bytes=2**20)) == (1, "aged")


def test_first_come_ignores_everything_else() -> None:
    rank_s = transfer_rank_s(
        since_s=3.0,
        remaining_bytes=1e12,
        priority=-1,
        is_unmasked=False,
        params=OrderParams(order="first-come"),
    )
    assert rank_s == 3.0


@given(
    st.integers(1, 10**12),
    st.sampled_from([{"priority": -100}, {"priority": 0}, {"is_unmasked": True}]),
    st.integers(1, 10**6),
)
def test_nothing_starves_behind_newcomers(size: int, kind: dict[str, Any], newcomer_bytes: int) -> None:
    """However large and unimportant, within minutes it goes before unmasked ones that have just come."""
    old = transfer(1, remaining_bytes=size, **kind)
    new = transfer(2, remaining_bytes=newcomer_bytes, is_unmasked=True, since_s=5.0 * (12 + 41))
    assert chosen(old, new)[0] == 1


class TestServed:
    """A link of 10 pieces a second, 1 MiB each, that newcomers keep busy."""

    def _serve(self, first: WaitingTransfer, newcomers_per_s: float) -> float:
        """When the first transfer was whole, while small unmasked ones came at the rate."""
        left = {first.number: (first, 0.0, first.remaining_bytes)}
        number, due_s, now_s = 100, 0.0, 0.0
        while first.number in left and now_s < 600:
            while due_s <= now_s:
                number += 1
                left[number] = (transfer(number, is_unmasked=True), due_s, MIB)
                due_s += 1 / newcomers_per_s
            waiting = [
                WaitingTransfer(
                    number=n,
                    begun=n,
                    remaining_bytes=size,
                    since_s=begun_s,
                    priority=t.priority,
                    is_unmasked=t.is_unmasked,
                )
                for n, (t, begun_s, size) in left.items()
            ]
            decision = choose_next(waiting, PARAMS)
            assert decision is not None
            t, begun_s, size = left.pop(decision.number)
            if size > MIB:
                left[decision.number] = (t, begun_s, size - MIB)
            now_s += 0.1
        return now_s

    def test_an_outlier_crosses_though_the_line_is_always_full(self) -> None:
        assert self._serve(transfer(1, priority=-1, remaining_bytes=50 * MIB), newcomers_per_s=10) < 120


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(-2, 2), st.booleans(), st.booleans()), max_size=8))
def test_the_choice_does_not_depend_on_the_order_of_the_list(rows: list[tuple[int, int, bool, bool]]) -> None:
    waiting = [
        transfer(i, remaining_bytes=size, priority=priority, is_unmasked=unmasked, is_held=held)
        for i, (size, priority, unmasked, held) in enumerate(rows)
    ]
    assert chosen(*waiting) == chosen(*reversed(waiting))
