"""Reads what the router asks of a prefill, and puts what vLLM hands over into the prompt's order.

Knows neither vLLM nor torch.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, NamedTuple

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


class ChunkOrder:
    """Where the chunks of a prompt stand when its KV crosses, and how many they are.

    With several KV cache groups a *position* (the n-th stretch of ``chunk_tokens`` tokens) has a chunk for
    each. A continuation needs all chunks of a group with full attention, but of a sliding window only the
    last ones; the others are stored, not sent. A place counts chunks in the order of positions, and within a
    position in the order of groups.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        """Orders chunks of groups with these windows.

        Args:
            windows: Per group, how many of its last chunks a continuation needs; None: all.
        """
        self._windows = tuple(windows)

    def num_chunks(self, num_positions: int) -> int:
        """Chunks a continuation after so many positions needs."""
        return sum(num_positions if n is None else min(n, num_positions) for n in self._windows)

    def place(self, group: int, position: int, num_positions: int) -> int | None:
        """The place, from 1, of a group's chunk at a position; None if the continuation does not need it.

        Args:
            group: Number of the group.
            position: Of the chunk, from 1.
            num_positions: Whole chunks of the prompt in one group.
        """
        if not 1 <= position <= num_positions or position <= self._first(group, num_positions):
            return None
        before = sum(max(0, position - 1 - self._first(g, num_positions)) for g in range(len(self._windows)))
        beside = sum(position > self._first(g, num_positions) for g in range(group))
        return before + beside + 1

    def _first(self, group: int, num_positions: int) -> int:
        """Positions in front of the first chunk of the group that is needed."""
        window = self._windows[group]
        return 0 if window is None else max(0, num_positions - window)


class Chunk(NamedTuple):
    """A chunk of a store job, sorted by its place in the prompt."""

    end_tokens: int
    group: int
    key: bytes
    slot: int


def in_prefix_order(
    keys: Iterable[bytes],
    groups: Iterable[int],
    slots: Iterable[int],
    positions: Iterable[int | None],
    *,
    chunk_tokens: int,
) -> list[Chunk]:
    """A job's chunks sorted by position and group; vLLM hands them over in hash order.

    What does not end on a chunk's boundary (a partial tail) is no chunk, and left out.
    """
    return sorted(
        Chunk(end_tokens=position, group=group, key=key, slot=int(slot))
        for key, group, slot, position in zip(keys, groups, slots, positions, strict=True)
        if position is not None and position % chunk_tokens == 0
    )
