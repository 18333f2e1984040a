"""Reads what the router asks of a prefill, and puts what vLLM hands over into the prompt's order.

Knows neither vLLM nor torch.
"""

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

PARAMS_KEY: Final = "pdd"
"""Where a request's ``kv_transfer_params`` carry our order."""

PeerId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class TransferOrder(msgspec.Struct, frozen=True):
    """What the router asks of a prefill: push its KV to these peers under this name."""

    transfer: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    targets: Annotated[list[PeerId], msgspec.Meta(min_length=1, max_length=64)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)]
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    """Higher goes first among masked transfers; below 0 are outliers, which go last."""
    unmasked: bool = False
    """Nobody decodes meanwhile: the user waits for this transfer."""
    hold: bool = False
    """Nothing goes to another site until the router says resume."""


def parse_order(params: object) -> TransferOrder | None:
    """The order in a request's ``kv_transfer_params``; None if there is none.

    Raises:
        ValueError: If there is one that is malformed.
    """
    if not isinstance(params, dict) or PARAMS_KEY not in params:
        return None
    try:
        return msgspec.convert(params[PARAMS_KEY], TransferOrder)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params.{PARAMS_KEY}: {error}") from error


def in_prefix_order(
    keys: Iterable[bytes], slots: Iterable[int], positions: Iterable[int | None], *, chunk_tokens: int
) -> tuple[list[bytes], list[int], list[int]]:
    """Keys, slots and end positions sorted by position; vLLM hands a job's keys over in hash order.

    What does not end on a chunk's boundary (a partial tail) is no chunk, and left out.
    """
    rows = sorted(
        (position, key, int(slot))
        for key, slot, position in zip(keys, slots, positions, strict=True)
        if position is not None and position % chunk_tokens == 0
    )
    return [key for _, key, _ in rows], [slot for _, _, slot in rows], [position for position, _, _ in rows]
