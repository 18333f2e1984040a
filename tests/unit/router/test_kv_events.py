"""Reading an engine's KV events: order, gaps, repetitions, restarts, and whatever else may come."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.fake_events import CLEARED, Event, batch, removed, stored

from pdd.core.block_hash import BlockHasher
from pdd.router.belief import CacheBelief, PromptBlocks, block_name
from pdd.router.kv_events import KvEventReader

HASHER = BlockHasher(algo="sha256_cbor", seed="0", block_tokens=4)
TOKENS = list(range(100, 122))  # five full blocks and two tokens


class Bench:
    """A reader and what it made of the batches."""

    def __init__(self) -> None:
        self.belief = CacheBelief(max_blocks=1000)
        self.reader = KvEventReader(engine_id="md0", belief=self.belief, hasher=HASHER)
        self.seq = 0

    def take(self, *events: Event, seq: int | None = None, ts: float = 1.0) -> bool:
        """One batch, numbered on."""
        number = self.seq if seq is None else seq
        self.seq = number + 1
        return self.reader.take(number, batch(events, ts=ts + number))

    def held(self, tokens: list[int] = TOKENS, *, salt: str | None = None) -> int:
        names = tuple(block_name(h) for h in HASHER.block_hashes(tokens, cache_salt=salt))
        asked = PromptBlocks(names=names, num_tokens=len(tokens), block_tokens=4, blocks_per_chunk=1)
        return self.belief.held_tokens(asked)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("as_numbers", [True, False])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_what_an_engine_stores_is_held_and_what_it_drops_is_not(
    bench: Bench, salt: str | None, as_numbers: bool
) -> None:
    assert bench.take(stored(TOKENS[:12], HASHER, salt=salt, as_numbers=as_numbers))
    assert bench.held(salt=salt) == 12
    assert bench.take(stored(TOKENS, HASHER, first=3, salt=salt, as_numbers=as_numbers))
    assert bench.held(salt=salt) == 20
    assert bench.held(salt="another") == 0
    assert bench.take(CLEARED)
    assert bench.held(salt=salt) == 0
    assert bench.reader.counts == {"read": 3}


def test_what_leaves_the_host_tier_is_still_in_the_store(bench: Bench) -> None:
    bench.take(stored(TOKENS, HASHER), stored(TOKENS, HASHER, medium="CPU"))
    bench.take(removed(TOKENS, HASHER), removed(TOKENS, HASHER, medium="CPU"), CLEARED)
    assert bench.belief.num_device_blocks == 0
    assert bench.held() == 20


def test_a_batch_that_is_missing_is_asked_for_and_read_in_its_turn(bench: Bench) -> None:
    bench.take(stored(TOKENS[:8], HASHER))
    late = batch([removed(TOKENS, HASHER, first=3)], ts=5.0)
    assert not bench.reader.take(3, late)
    assert bench.reader.next_seq == 1
    bench.reader.take_repeated(
        [(0, b"known"), (1, batch([stored(TOKENS, HASHER, first=2)], ts=2.0)), (2, batch([], ts=3.0))]
    )
    bench.reader.take_late(3, late)
    assert bench.held() == 12
    assert bench.reader.counts == {"read": 2, "repeated": 2}


def test_what_cannot_be_repeated_makes_the_device_unknown_and_the_store_not(bench: Bench) -> None:
    bench.take(stored(TOKENS, HASHER), stored(TOKENS[:8], HASHER, medium="CPU"))
    late = batch([stored(TOKENS[:12], HASHER, first=2)], ts=9.0)
    assert not bench.reader.take(7, late)
    bench.reader.take_repeated([(5, batch([], ts=7.0)), (6, batch([], ts=8.0))])
    bench.reader.take_late(7, late)
    assert bench.reader.counts == {"read": 2, "lost": 4, "repeated": 2}
    assert bench.belief.num_device_blocks == 1
    assert bench.held() == 8  # of the store; block 2 is on the device, but nothing joins them there
    assert bench.reader.next_seq == 8


def test_batches_that_were_repeated_do_not_count_again_when_they_come(bench: Bench) -> None:
    first, second = batch([stored(TOKENS, HASHER)], ts=1.0), batch([CLEARED], ts=2.0)
    bench.reader.take_repeated([(0, first), (1, second)])
    assert bench.reader.take(0, first)
    assert bench.reader.take(1, second)
    assert bench.held() == 0
    assert bench.reader.counts == {"repeated": 2}


def test_a_forgotten_engine_is_followed_from_its_first_batch(bench: Bench) -> None:
    bench.take(stored(TOKENS, HASHER))
    bench.reader.forget()
    assert bench.held() == 0
    assert bench.reader.take(0, batch([stored(TOKENS[:4], HASHER)], ts=0.5))
    assert bench.held() == 4


def test_an_engine_that_is_met_in_the_middle_has_lost_nothing(bench: Bench) -> None:
    bench.reader.take_repeated([(40, batch([stored(TOKENS, HASHER)], ts=1.0))])
    assert bench.held() == 20
    assert bench.reader.counts == {"repeated": 1}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not msgpack",
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode([1.0, "no list", 0]),
        msgspec.msgpack.encode([1.0, ["no map"], 0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "no list"}], 0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [1], "medium": 3}], 0]),
    ],
)
def test_a_batch_that_cannot_be_read_makes_the_device_unknown_and_nothing_else(
    bench: Bench, payload: bytes
) -> None:
    bench.take(stored(TOKENS, HASHER), stored(TOKENS[:8], HASHER, medium="CPU"))
    assert bench.reader.take(1, payload)
    assert bench.reader.counts["bad"] == 1
    assert bench.held() == 8
    assert bench.reader.take(2, batch([stored(TOKENS, HASHER)], ts=5.0))
    assert bench.held() == 20


@given(st.binary(max_size=60))
def test_no_payload_raises(payload: bytes) -> None:
    Bench().reader.take(0, payload)


def test_kinds_of_events_that_are_new_and_other_cache_groups_are_passed_over(bench: Bench) -> None:
    new: Event = {"type": "BlockMoved", "from": "GPU", "to": "MOON"}
    other = {**stored(TOKENS, HASHER), "group_idx": 1}
    more = {**stored(TOKENS[:8], HASHER), "a_field_of_tomorrow": [1, {"a": 2}]}
    assert bench.take(new, other, more)
    assert bench.held() == 8
    assert bench.reader.counts == {"read": 1}


@pytest.mark.parametrize(
    ("hasher", "is_foreign"),
    [
        (HASHER, False),
        (BlockHasher(algo="sha256_cbor", seed="1", block_tokens=4), True),
        (BlockHasher(algo="sha256", seed="0", block_tokens=4), True),
        (BlockHasher(algo="sha256_cbor", seed="0", block_tokens=8), True),
    ],
)
def test_an_engine_that_hashes_otherwise_is_noticed_once(
    bench: Bench, hasher: BlockHasher, is_foreign: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        bench.take(stored(TOKENS, hasher, salt="s"))
    assert bench.reader.counts["foreign"] == 3 * is_foreign
    assert len(caplog.records) == is_foreign
    assert all("hashes its blocks otherwise" in record.message for record in caplog.records)


def test_blocks_whose_hash_the_event_does_not_explain_are_not_compared(bench: Bench) -> None:
    image: Any = {**stored(TOKENS, HASHER), "extra_keys": [[["image", 0]], None, None, None, None]}
    adapter = {**stored(TOKENS, HASHER), "block_hashes": [1, 2, 3, 4, 5], "lora_name": "adapter"}
    bench.take(image, adapter)
    assert bench.reader.counts == {"read": 1}


def test_counts_are_given_once(bench: Bench) -> None:
    bench.take()
    assert bench.reader.take_counts() == {"read": 1}
    assert bench.reader.take_counts() == {}


def test_reads_what_vllm_writes(bench: Bench) -> None:
    theirs = pytest.importorskip(
        "vllm.distributed.kv_events", reason="vllm is not installed, so its events cannot be read"
    )
    hashes = HASHER.block_hashes(TOKENS, cache_salt="s")
    event = theirs.BlockStored(
        block_hashes=[block_name(h) for h in hashes],
        parent_block_hash=None,
        token_ids=TOKENS[:20],
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[("s",), None, None, None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    gone = theirs.BlockRemoved(block_hashes=[hashes[-1]], medium="GPU", group_idx=0)
    whole = theirs.KVEventBatch(ts=1.0, events=[theirs.AllBlocksCleared(), event, gone])
    assert bench.reader.take(0, msgspec.msgpack.encode(whole))
    assert bench.held(salt="s") == 16
    assert bench.reader.counts == {"read": 1}
