"""Reads the KV events of one engine into the belief about its caches; knows no socket.

Batches are numbered. One that is missing is asked for again; what cannot be had any more makes the device
cache unknown, for a block that left it unheard would be believed for ever. A batch that cannot be read
counts as missing.

Source:
    vllm/distributed/kv_events.py@0.32.0 (frames, numbering, replay),
    vllm/v1/core/block_pool.py@0.32.0 (events of the device cache),
    vllm/distributed/kv_transfer/kv_connector/v1/offloading/events.py@0.32.0 (events of the host tier).
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from pdd.config.schema import PddConfig
from pdd.core.block_hash import BlockHasher
from pdd.router.belief import CacheBelief, block_name

log = logging.getLogger(__name__)

Result = Literal["read", "repeated", "lost", "bad", "foreign"]
RESULTS: tuple[Result, ...] = ("read", "repeated", "lost", "bad", "foreign")

DEVICE = "GPU"
"""What vLLM calls the device cache on every device."""
KNOWN_GROUPS = (None, 0)
"""The KV cache group that the router's hashes stand for."""


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that a cache has taken in; the tokens are read only where the hashes are checked."""

    block_hashes: list[bytes | int] = []
    parent_block_hash: bytes | int | None = None
    token_ids: msgspec.Raw = msgspec.Raw(b"\x90")
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[msgspec.Raw] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that a cache has dropped."""

    block_hashes: list[bytes | int] = []
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The device cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    """What one step of the engine changed; events stay packed, since a kind that is new must not spoil the
    rest."""

    ts: float
    events: list[msgspec.Raw]


class _Tag(msgspec.Struct):
    type: str = ""


_decode_batch = msgspec.msgpack.Decoder(Batch).decode
_decode_event = msgspec.msgpack.Decoder(KvEvent).decode
_decode_tag = msgspec.msgpack.Decoder(_Tag).decode
_decode_tokens = msgspec.msgpack.Decoder(list[int]).decode
_decode_salt = msgspec.msgpack.Decoder(str).decode
_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def block_hasher(config: PddConfig) -> BlockHasher:
    """The hasher that agrees with the fleet's engines."""
    return BlockHasher(
        algo=config.kv.hash_algo,
        seed=config.kv.hash_seed,
        block_tokens=config.kv.block_size_tokens,
        blocks_per_chunk=config.kv.blocks_per_chunk,
    )


class KvEventReader:
    """One engine's events, in order.

    Args:
        engine_id: In messages.
        belief: Written to.
        hasher: The router's own hashes, which the engine's are compared with where that is possible.
    """

    def __init__(self, *, engine_id: str, belief: CacheBelief, hasher: BlockHasher) -> None:
        self.next_seq = 0
        self.counts: Counter[Result] = Counter()
        self._engine_id = engine_id
        self._belief = belief
        self._hasher = hasher
        self._is_foreign = False

    def forget(self) -> None:
        """It may be another engine from now on: it counts from 0, and its device cache is not known."""
        self.next_seq = 0
        self._is_foreign = False
        self._belief.clear_device()

    def take(self, seq: int, payload: bytes) -> bool:
        """Read one batch as it was published; false if those from ``next_seq`` on must be repeated first."""
        if seq > self.next_seq:
            return False
        if seq == self.next_seq:  # else it was repeated before it came in its turn
            self._read(payload, "read")
        return True

    def take_repeated(self, batches: Sequence[tuple[int, bytes]]) -> None:
        """Read what the engine repeated when asked for everything from ``next_seq`` on."""
        for seq, payload in batches:
            if seq < self.next_seq:
                continue
            self._skip_to(seq)
            self._read(payload, "repeated")

    def take_late(self, seq: int, payload: bytes) -> None:
        """Read a batch whose predecessors were asked for and did not come."""
        self._skip_to(max(seq, self.next_seq))
        self.take(seq, payload)

    def take_counts(self) -> Counter[Result]:
        """What became of the batches since this was asked last."""
        counts, self.counts = self.counts, Counter()
        return counts

    def note_bad(self) -> None:
        """Something came that is no batch."""
        self.counts["bad"] += 1

    def _skip_to(self, seq: int) -> None:
        if seq == self.next_seq:
            return
        # What an engine did before it was first heard of is no loss: nothing is believed of it yet.
        if self.next_seq:
            self.counts["lost"] += seq - self.next_seq
        self._belief.clear_device()
        self.next_seq = seq

    def _read(self, payload: bytes, result: Result) -> None:
        self.next_seq += 1
        try:
            for raw in _decode_batch(payload).events:
                self._apply(raw)
        except msgspec.MsgspecError:
            self.counts["bad"] += 1
            self._belief.clear_device()
        else:
            self.counts[result] += 1

    def _apply(self, raw: msgspec.Raw) -> None:
        if _decode_tag(raw).type not in _KINDS:
            return
        event = _decode_event(raw)
        if isinstance(event, AllBlocksCleared):
            self._belief.clear_device()
        elif event.group_idx not in KNOWN_GROUPS:
            return
        elif isinstance(event, BlockRemoved):
            # What the host tier drops is still in the agent's store, which has a copy of all it took in.
            if event.medium == DEVICE:
                self._belief.off_device(_names(event.block_hashes))
        elif event.medium == DEVICE:
            self._check(event)
            self._belief.on_device(_names(event.block_hashes))
        else:
            self._belief.in_store(_names(event.block_hashes))

    def _check(self, event: BlockStored) -> None:
        """Compare the first block of a prompt with the router's hash of it: an engine may hash otherwise."""
        if event.parent_block_hash is not None or not event.block_hashes or event.lora_name is not None:
            return  # the path of an adapter is part of its hashes, and no event names it
        extra = (event.extra_keys[0] or []) if event.extra_keys else []
        if len(extra) > 1:
            return
        try:
            salt = _decode_salt(extra[0]) if extra else None
        except msgspec.MsgspecError:
            return  # an image
        tokens = _decode_tokens(event.token_ids)[: self._hasher.block_tokens]
        own = self._hasher.block_hashes(tokens, cache_salt=salt)
        if own and block_name(own[0]) == _names(event.block_hashes)[0]:
            return
        self.counts["foreign"] += 1
        if not self._is_foreign:
            self._is_foreign = True
            log.warning(
                "engine %s hashes its blocks otherwise than kv.hash_algo, kv.hash_seed and "
                "kv.block_size_tokens say: what its caches hold is not known",
                self._engine_id,
            )


def _names(hashes: Sequence[bytes | int]) -> list[int]:
    return [name if isinstance(name, int) else block_name(name) for name in hashes]
