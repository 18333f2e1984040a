"""What one engine's caches are believed to hold.

It is a hint: the offer decides what is sent, and the engine what it finds.

Two caches, each known in its own way. The *device* cache is told by the engine's KV events, block by block,
with what leaves it. The *store* of the agent beside it takes in whatever the engine offloads (the events
say so) and whatever lands from a peer (the router heard so); what it drops is not told, so the same order
of last use decides here, over as many chunks as the agent has slots for.

Blocks are named by the low eight bytes of their hash, which is what an engine says of them by default; that
any two of a million share a name has a chance below one in ten million.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


def block_name(block_hash: bytes) -> int:
    """The low 64 bits of a block hash.

    Source:
        vllm/v1/core/kv_cache_utils.py@0.32.0 (``maybe_convert_block_hash``).
    """
    return int.from_bytes(block_hash[-8:], "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBlocks:
    """The full blocks of a prompt by name, in order; empty where they cannot be known.

    Args:
        names: One per full block.
        num_tokens: Tokens of the whole prompt.
        block_tokens: Tokens per block.
        blocks_per_chunk: Blocks per chunk of the store; the last one names it.
    """

    names: tuple[int, ...]
    num_tokens: int
    block_tokens: int
    blocks_per_chunk: int

    @property
    def chunks(self) -> tuple[int, ...]:
        """The full chunks by name, in order."""
        return self.names[self.blocks_per_chunk - 1 :: self.blocks_per_chunk]


class CacheBelief:
    """See the module.

    Args:
        max_blocks: Bound on the names kept, for the device and the store apart; the least recently used go
            first.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._device: OrderedDict[int, None] = OrderedDict()
        self._store: OrderedDict[int, None] = OrderedDict()
        self._store_slots = max_blocks

    @property
    def num_chunks(self) -> int:
        """Chunks believed to be in the store."""
        return len(self._store)

    @property
    def num_device_blocks(self) -> int:
        """Blocks believed to be in the device cache."""
        return len(self._device)

    # ---- what is heard

    def on_device(self, names: Iterable[int]) -> None:
        """The blocks are in the device cache now."""
        _add(self._device, names, self._max_blocks)

    def off_device(self, names: Iterable[int]) -> None:
        """The blocks have left the device cache."""
        for name in names:
            self._device.pop(name, None)

    def clear_device(self) -> None:
        """Nothing is believed to be in the device cache any more."""
        self._device.clear()

    def in_store(self, chunks: Iterable[int]) -> None:
        """The chunks are in the store now, and young."""
        _add(self._store, chunks, self._store_slots)

    def store_is(self, *, slots: int, used: int) -> None:
        """The agent has counted: room for so many chunks, and so many there. More cannot be believed."""
        self._store_slots = min(slots or self._max_blocks, self._max_blocks)
        _trim(self._store, min(used, self._store_slots))

    # ---- what is asked

    def missing_chunks(self, prompt: PromptBlocks) -> int:
        """How many of the prompt's chunks an offer to the store is predicted to be answered with."""
        return sum(chunk not in self._store for chunk in prompt.chunks)

    def held_tokens(self, prompt: PromptBlocks) -> int:
        """How many tokens of the prompt the engine is predicted to find: on the device, then in the store.

        As vLLM does it: the last token of a prompt is always computed, and so is the block it ends.
        """
        held = 0
        while held < len(prompt.names) and prompt.names[held] in self._device:
            held += 1
        size = prompt.blocks_per_chunk
        for chunk in prompt.chunks[held // size :]:
            if chunk not in self._store:
                break
            held = (held // size + 1) * size
        return min(held, max(0, prompt.num_tokens - 1) // prompt.block_tokens) * prompt.block_tokens


def _add(names: OrderedDict[int, None], new: Iterable[int], limit: int) -> None:
    for name in new:
        names[name] = None
        names.move_to_end(name)
    _trim(names, limit)


def _trim(names: OrderedDict[int, None], limit: int) -> None:
    while len(names) > limit:
        names.popitem(last=False)
