"""What the router asks of a prefill is validated; what vLLM hands over is put in order."""

from typing import Any

import pytest

from pdd.engine.orders import TransferOrder, in_prefix_order, parse_order


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
    keys, slots, ends = in_prefix_order(
        [b"c", b"a", b"tail", b"?", b"b"], [3, 1, 9, 8, 2], [96, 32, 100, None, 64], chunk_tokens=32
    )
    assert (keys, slots, ends) == ([b"a", b"b", b"c"], [1, 2, 3], [32, 64, 96])
