"""The order of the send queue: who goes first, and that everybody goes at last."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.send_order import OrderParams, WaitingTransfer, choose_next

PARAMS = OrderParams(ageing_s=5.0)
MIB = 2**20


def transfer(number: int, **changes: Any) -> WaitingTransfer:
    values: dict[str, Any] = {
        "number": number,
        "rank": number,
        "remaining_bytes": 10 * MIB,
        "waiting_s": 0.0,
    }
    return WaitingTransfer(**(values | changes))


def chosen(*waiting: WaitingTransfer) -> tuple[int, str] | None:
    decision = choose_next(waiting, PARAMS)
    return decision and (decision.number, decision.reason)


def test_unmasked_goes_before_masked_before_outlier() -> None:
    outlier = transfer(1, priority=-1, remaining_bytes=1)
    masked = transfer(2, remaining_bytes=2)
    unmasked = transfer(3, is_unmasked=True, remaining_bytes=10**12)
    assert chosen(outlier, masked, unmasked) == (3, "unmasked")
    assert chosen(outlier, masked) == (2, "masked")
    assert chosen(outlier) == (1, "outlier")


def test_the_shortest_remaining_goes_first_and_then_who_began_first() -> None:
    assert chosen(transfer(1, remaining_bytes=20), transfer(2, remaining_bytes=10)) == (2, "masked")
    assert chosen(transfer(2), transfer(1)) == (1, "masked")


def test_priority_comes_before_length_among_masked() -> None:
    soon = transfer(1, priority=5, remaining_bytes=100 * MIB)
    assert chosen(soon, transfer(2, remaining_bytes=1)) == (1, "masked")


def test_held_never_goes() -> None:
    assert chosen(transfer(1, is_held=True)) is None
    assert chosen(transfer(1, is_held=True, is_unmasked=True, waiting_s=10**6), transfer(2)) == (2, "masked")
    assert chosen() is None


def test_waiting_raises_by_a_class() -> None:
    assert chosen(transfer(1, waiting_s=5.1, remaining_bytes=1), transfer(2, is_unmasked=True)) == (1, "aged")
    assert chosen(transfer(1, priority=-1, waiting_s=5.1, remaining_bytes=1), transfer(2)) == (2, "masked")


@given(
    st.integers(1, 10**12),
    st.sampled_from([{"priority": -100}, {"priority": 0}, {"is_unmasked": True}]),
    st.integers(1, 10**6),
)
def test_nothing_starves_behind_newcomers(size: int, kind: dict[str, Any], newcomer_bytes: int) -> None:
    """However large and unimportant, within minutes it goes before unmasked ones that have just come."""
    old = transfer(1, remaining_bytes=size, waiting_s=5.0 * (3 + 41), **kind)
    new = transfer(2, remaining_bytes=newcomer_bytes, is_unmasked=True)
    assert chosen(old, new) is not None
    assert chosen(old, new)[0] == 1  # type: ignore[index]


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
                    rank=n,
                    remaining_bytes=size,
                    waiting_s=now_s - begun_s,
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
