"""What the router asks of a prefill is validated; what vLLM hands over is put in order."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.engine.orders import ChunkOrder, TransferOrder, in_prefix_order, parse_order


def test_an_order_is_read() -> None:
    params = {"pdd": {"transfer": "t1", "targets": ["rld0", "md0"], "prompt_tokens": 500, "new_field": 1}}
    assert parse_order(params) == TransferOrder(transfer="t1", targets=["rld0", "md0"], prompt_tokens=500)


def test_an_order_may_hold_back_and_rank_its_transfer() -> None:
    pdd = {
        "transfer": "t1",
        "targets": ["md0"],
        "prompt_tokens": 5,
        "hold": True,
        "priority": -1,
        "unmasked": True,
    }
    order = parse_order({"pdd": pdd})
    assert order is not None
    assert (order.hold, order.priority, order.unmasked) == (True, -1, True)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, [], "pdd"])
def test_requests_without_an_order_have_none(params: Any) -> None:
    assert parse_order(params) is None


@pytest.mark.parametrize(
    "order",
    [
        None,
        5,
        [],
        {},
        {"transfer": "t", "targets": ["a"]},
        {"transfer": "", "targets": ["a"], "prompt_tokens": 1},
        {"transfer": "t" * 257, "targets": ["a"], "prompt_tokens": 1},
        {"transfer": "t", "targets": [], "prompt_tokens": 1},
        {"transfer": "t", "targets": "rld0", "prompt_tokens": 1},
        {"transfer": "t", "targets": [1], "prompt_tokens": 1},
        {"transfer": "t", "targets": ["a"], "prompt_tokens": -1},
        {"transfer": "t", "targets": ["a"], "prompt_tokens": "many"},
        {"transfer": "t", "targets": ["a"] * 65, "prompt_tokens": 1},
        {"transfer": "t", "targets": ["a"], "prompt_tokens": 1, "hold": "a"},
        {"transfer": "t", "targets": ["a"], "prompt_tokens": 1, "priority": {"a": -1}},
        {"transfer": "t", "targets": ["a"], "prompt_tokens": 1, "priority": -101},
    ],
)
def test_malformed_orders_are_named(order: Any) -> None:
    with pytest.raises(ValueError, match=r"kv_transfer_params\.pdd"):
        parse_order({"pdd": order})


def test_chunks_come_in_the_order_of_the_prompt_and_partial_tails_not_at_all() -> None:
    chunks = in_prefix_order(
        [b"c", b"a", b"tail", b"?", b"b", b"B"],
        [0, 0, 0, 0, 0, 1],
        [3, 1, 9, 8, 2, 5],
        [96, 32, 100, None, 64, 64],
        chunk_tokens=32,
    )
    assert chunks == [(32, 0, b"a", 1), (64, 0, b"b", 2), (64, 1, b"B", 5), (96, 0, b"c", 3)]


def test_with_one_group_places_are_positions() -> None:
    order = ChunkOrder([None])
    assert [order.place(0, n, 5) for n in range(7)] == [None, 1, 2, 3, 4, 5, None]
    assert order.num_chunks(5) == 5


def test_of_a_window_only_the_last_chunks_have_places() -> None:
    order = ChunkOrder([2, None])
    assert [order.place(0, n, 4) for n in range(1, 5)] == [None, None, 3, 5]
    assert [order.place(1, n, 4) for n in range(1, 5)] == [1, 2, 4, 6]


@given(
    windows=st.lists(st.none() | st.integers(1, 6), min_size=1, max_size=4),
    num_positions=st.integers(0, 12),
)
def test_places_count_the_needed_chunks_in_order(windows: list[int | None], num_positions: int) -> None:
    order = ChunkOrder(windows)
    needed = [
        (position, group)
        for position in range(1, num_positions + 1)
        for group, window in enumerate(windows)
        if window is None or position > num_positions - window
    ]
    assert order.num_chunks(num_positions) == len(needed)
    for position in range(num_positions + 2):
        for group in range(len(windows)):
            expected = needed.index((position, group)) + 1 if (position, group) in needed else None
            assert order.place(group, position, num_positions) == expected
