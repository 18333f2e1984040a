"""The tier inside vLLM's own tiering manager, beside an agent of the test kit; no engine, no model."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
from tests.kit.fake_agent import FakeAgent

from pdd.core.errors import ConfigurationError
from pdd.core.fingerprint import FIELDS
from pdd.engine import vllm_api
from pdd.engine.shape import SAMPLER_KEY, SHAPE_KEY, CacheGroup, CacheShape, Kind
from pdd.engine.spec import PddOffloadingSpec
from pdd.engine.vllm_api import LookupResult, OffloadPolicy, ReqContext, ScheduleEndContext
from pdd.wire.local import BeginTransfer, FinishRequest, StoreChunks, Touch

CHUNK_TOKENS, CHUNK_BYTES, NUM_SLOTS = 32, 4096, 16


def offloading_config(socket: Path, **changes: Any) -> Any:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    tier = {
        "type": "PddTier",
        "module_path": "pdd.engine.tier",
        "agent_socket": str(socket),
        "hash_algo": "sha256_cbor",
        "hash_seed": "0",
        "chunk_tokens": CHUNK_TOKENS,
    } | changes
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=32, layer_names=("l",), group_id=0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": NUM_SLOTS * CHUNK_BYTES,
            "secondary_tiers": [tier],
            SHAPE_KEY: CacheShape(groups=(CacheGroup(kind=Kind.FULL, block_tokens=32),)),
            SAMPLER_KEY: "v1",
        },
        engine_id=f"pdd-test-{uuid.uuid4().hex[:8]}",
        model=OffloadingModelConfig(name="no-such-model", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        kv_cache_layout="LBHNC",
    )


@pytest.fixture(autouse=True)
def _root_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    root = vllm_api.expected_root_hash("sha256_cbor", "0")
    monkeypatch.setattr(vllm_api.kv_cache_utils, "NONE_HASH", root, raising=False)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    fake = FakeAgent(tmp_path / "agent.sock").start()
    yield fake
    fake.stop()


class Scheduler:
    """As much of vLLM's scheduler as the offloading manager needs."""

    def __init__(self, socket: Path) -> None:
        self.spec = PddOffloadingSpec(offloading_config(socket))
        self.manager: Any = self.spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def wait_connected(self) -> None:
        deadline_s = time.monotonic() + 60
        while not self.tier._link.connected:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def request(
        self, name: str, num_chunks: int, params: Any = None, *, prefix: str = ""
    ) -> tuple[Any, list[bytes]]:
        context = ReqContext(req_id=name, kv_transfer_params=params)
        keys = [f"{prefix or name}/{i}".encode().rjust(32, b".") + bytes(4) for i in range(num_chunks)]
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, (i + 1) * CHUNK_TOKENS)
        self.policy = self.manager.on_new_request(context).policy
        return context, keys

    def store(self, context: Any, keys: list[bytes]) -> None:
        """The device-to-host copy of these chunks is done; in batches, as steps make them."""
        for start in range(0, len(keys), 4):
            batch = keys[start : start + 4]
            output = self.manager.prepare_store(batch, context)
            assert output is not None
            for key, slot in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
                self.rows[slot, :CHUNK_BYTES] = sum(key) % 251
            self.manager.complete_store(set(output.keys_to_store), context)
            self.settle()

    def settle(self) -> None:
        """Steps until no job is open."""
        deadline_s = time.monotonic() + 60
        while True:
            self.step()
            if not self.manager.has_pending_work():
                return
            assert time.monotonic() < deadline_s, "jobs never ended"
            time.sleep(0.001)

    def step(self, *new: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=list(new), preempted_req_ids=()))

    def scan(self, context: Any, keys: list[bytes]) -> int | None:
        """As ``_maximal_prefix_lookup``."""
        hits, deferred = 0, False
        for key in keys:
            result = self.manager.lookup(key, context)
            if result is LookupResult.MISS:
                break
            deferred |= result is not LookupResult.HIT
            hits += result is not LookupResult.RETRY
        return None if deferred else hits

    def run(self, context: Any, keys: list[bytes], *, max_steps: int = 20_000) -> int:
        """Scans once a step until the request can run; returns its hits, which hold the right bytes."""
        for _ in range(max_steps):
            hits = self.scan(context, keys)
            if hits is not None:
                if hits:
                    loaded = self.manager.prepare_load(keys[:hits], context)
                    for key, slot in zip(keys, loaded.block_ids.tolist(), strict=False):
                        assert set(self.rows[slot, :CHUNK_BYTES].tolist()) == {sum(key) % 251}
                    self.manager.complete_load(keys[:hits], context)
                self.step(context.req_id)
                return hits
            self.step()
            time.sleep(0.0002)
        raise AssertionError("the request never ran")

    def clear_primary(self) -> None:
        self.manager.reset_cache()

    def shutdown(self) -> None:
        del self.rows
        self.manager.shutdown()


@pytest.fixture
def scheduler(tmp_path: Path, agent: FakeAgent) -> Iterator[Scheduler]:
    made = Scheduler(tmp_path / "agent.sock")
    made.wait_connected()
    yield made
    made.shutdown()


def test_the_engine_introduces_itself(agent: FakeAgent, scheduler: Scheduler) -> None:
    hello = agent.hello
    assert hello is not None
    assert tuple(hello.fingerprint) == FIELDS
    assert hello.fingerprint["hash"] == "sha256_cbor/0"
    assert hello.fingerprint["platform"].startswith("cpu/")
    assert hello.sampler == "v1"
    assert (hello.chunk_bytes, hello.chunk_tokens, hello.num_primary_slots) == (
        CHUNK_BYTES,
        CHUNK_TOKENS,
        NUM_SLOTS,
    )


def test_chunks_reach_the_store_in_prompt_order_and_come_back(agent: FakeAgent, scheduler: Scheduler) -> None:
    context, keys = scheduler.request("r", 6)
    assert scheduler.policy is OffloadPolicy.CHUNK_LEVEL
    scheduler.store(context, keys)
    jobs = agent.wait_for(StoreChunks, count=2)
    assert [key for job in jobs for key in job.keys] == keys
    assert {end for job in jobs for end in job.end_tokens} == {0}  # nobody asked to send them
    scheduler.clear_primary()
    again, keys = scheduler.request("r2", 8, prefix="r")
    assert scheduler.run(again, keys) == 6
    assert not scheduler.manager.has_pending_work()


def test_an_order_is_passed_on_and_ended(agent: FakeAgent, scheduler: Scheduler) -> None:
    params = {"pdd": {"transfer": "t1", "targets": ["rld0", "md0"], "prompt_tokens": 70}}
    context, keys = scheduler.request("r", 2, params)
    assert scheduler.policy is OffloadPolicy.REQUEST_LEVEL
    scheduler.store(context, keys)
    scheduler.manager.on_request_finished(context)
    agent.wait_for(Touch)
    assert [type(message) for message in agent.received[1:]] == [
        BeginTransfer,
        StoreChunks,
        FinishRequest,
        Touch,
    ]
    assert agent.received[1] == BeginTransfer(
        request="r", transfer="t1", targets=["rld0", "md0"], prompt_tokens=70, num_chunks=2
    )


def test_a_malformed_order_is_logged_and_ignored(agent: FakeAgent, scheduler: Scheduler) -> None:
    context, keys = scheduler.request("r", 1, {"pdd": {"transfer": 5}})
    assert scheduler.policy is OffloadPolicy.CHUNK_LEVEL
    scheduler.store(context, keys)
    agent.wait_for(StoreChunks)
    assert not any(isinstance(message, BeginTransfer) for message in agent.received)


def test_a_finished_request_touches_its_prefix_last(agent: FakeAgent, scheduler: Scheduler) -> None:
    context, keys = scheduler.request("r", 3)
    scheduler.store(context, keys)
    scheduler.manager.on_request_finished(context)
    assert agent.wait_for(Touch)[0].keys == keys[::-1]


def test_a_prompt_longer_than_the_primary_tier_still_runs(scheduler: Scheduler) -> None:
    context, keys = scheduler.request("long", 3 * NUM_SLOTS)
    scheduler.store(context, keys)
    scheduler.clear_primary()
    again, keys = scheduler.request("again", 3 * NUM_SLOTS, prefix="long")
    assert scheduler.run(again, keys) == NUM_SLOTS * 3 // 4


def test_prompts_that_together_exceed_the_primary_tier_all_run(scheduler: Scheduler) -> None:
    names = ("a", "b", "c", "d")
    for name in names:
        context, keys = scheduler.request(name, 10)
        scheduler.store(context, keys)
        scheduler.manager.on_request_finished(context)
    scheduler.clear_primary()
    waiting = {name: scheduler.request(f"{name}2", 10, prefix=name) for name in names}
    deadline_s = time.monotonic() + 20
    hits: dict[str, int] = {}
    while waiting:
        assert time.monotonic() < deadline_s, f"{waiting.keys()} never ran"
        for name, (context, keys) in list(waiting.items()):
            found = scheduler.scan(context, keys)
            if found is not None:
                hits[name] = found
                scheduler.step(context.req_id)
                del waiting[name]
        scheduler.step()
        time.sleep(0.0005)
    assert sum(hits.values()) >= 3 * 10
    assert scheduler.tier._bound.promised_chunks == 0


def test_chunks_the_agent_has_lost_meanwhile_are_misses(agent: FakeAgent, scheduler: Scheduler) -> None:
    context, keys = scheduler.request("r", 4)
    scheduler.store(context, keys)
    scheduler.clear_primary()
    del agent.chunks[keys[2]]
    again, keys = scheduler.request("r2", 4, prefix="r")
    # The lost chunk is still in the mirror: after as many promotions as one chunk may have, it is a miss.
    assert scheduler.run(again, keys) == 2


def test_without_an_agent_everything_is_a_miss_and_nothing_waits(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path / "nobody.sock")
    context, keys = scheduler.request("r", 4)
    scheduler.store(context, keys)
    scheduler.clear_primary()
    again, keys = scheduler.request("r2", 4, prefix="r")
    assert scheduler.run(again, keys, max_steps=1) == 0
    scheduler.shutdown()


def test_an_engine_with_another_hash_never_connects(
    tmp_path: Path, agent: FakeAgent, monkeypatch: Any
) -> None:
    other = vllm_api.expected_root_hash("xxhash", "0")
    monkeypatch.setattr(vllm_api.kv_cache_utils, "NONE_HASH", other, raising=False)
    scheduler = Scheduler(tmp_path / "agent.sock")
    scheduler.tier._link._thread.join(timeout=5)
    assert not scheduler.tier._link._thread.is_alive()
    assert agent.received == []
    scheduler.shutdown()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chunk_tokens": 64}, "32 tokens"),
        ({"backpressure": {"backpressure_cls": "EMABackpressureDetector"}}, "back pressure"),
        ({"hash_algo": "xxhash"}, "sha256"),
    ],
)
def test_wrong_settings_stop_the_engine(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        PddOffloadingSpec(offloading_config(tmp_path / "agent.sock", **changes)).get_manager()


def test_shutdown_lets_go_of_the_primary_tier(tmp_path: Path, agent: FakeAgent) -> None:
    scheduler = Scheduler(tmp_path / "agent.sock")
    scheduler.wait_connected()
    region = scheduler.spec._scheduler_mmap
    path = Path(region.mmap_path)
    assert path.exists()  # no worker made it, so it is still this process's
    scheduler.shutdown()
    assert region.mmap_obj is None
    assert not path.exists()


def test_the_memorys_name_goes_once_the_scheduler_has_mapped_it(tmp_path: Path, agent: FakeAgent) -> None:
    config = offloading_config(tmp_path / "agent.sock")
    worker_region = vllm_api.SharedOffloadRegion(
        engine_id=config.engine_id,
        num_chunks=NUM_SLOTS,
        rank=0,
        kv_bytes_per_chunk=CHUNK_BYTES,
        cpu_page_size=CHUNK_BYTES,
    )
    path = Path(worker_region.mmap_path)
    manager = PddOffloadingSpec(config).get_manager()
    assert not path.exists()
    worker_region._creator = False
    manager.shutdown()
    worker_region.cleanup()


def test_metrics_say_what_changed(scheduler: Scheduler) -> None:
    stats = scheduler.tier.get_stats()
    assert stats is not None
    assert stats.reduce()["vllm:pdd_agent_connected"] == 1
    assert scheduler.tier.get_stats() is None
    context, keys = scheduler.request("long", 2 * NUM_SLOTS)
    scheduler.store(context, keys)
    scheduler.clear_primary()
    again, keys = scheduler.request("again", 2 * NUM_SLOTS, prefix="long")
    scheduler.run(again, keys)
    reported = scheduler.tier.get_stats().reduce()
    assert reported["vllm:pdd_store_chunks"] == 2 * NUM_SLOTS
    assert any(name.startswith("vllm:pdd_lookups_bounded") for name in reported)
    assert set(scheduler.tier.build_metric_definitions({})) == {
        "vllm:pdd_agent_connected",
        "vllm:pdd_store_chunks",
        "vllm:pdd_lookups_bounded",
    }


def test_other_vllm_versions_are_refused() -> None:
    assert vllm_api.check_vllm_version("0.32.1+cpu") == "0.32.1+cpu"
    for version in ("0.31.4", "0.33.0", "1.0"):
        with pytest.raises(ConfigurationError, match=r"0\.32\.\*"):
            vllm_api.check_vllm_version(version)


@pytest.mark.parametrize(
    ("is_canonical", "workers", "shards", "shares"),
    [(True, 1, 1, 1), (True, 2, 2, 2), (True, 4, 2, 2), (True, 4, 1, 1), (False, 4, 2, 4)],
)
def test_a_chunk_has_every_share_of_the_heads_once(
    tmp_path: Path, is_canonical: bool, workers: int, shards: int, shares: int
) -> None:
    """In the canonical layout; else each worker's part, copies or not. Peers are told which it is."""
    config = offloading_config(tmp_path / "agent.sock")
    groups = (CacheGroup(kind=Kind.FULL, block_tokens=32),)
    spec = PddOffloadingSpec(
        replace(
            config,
            canonical_layout=is_canonical,
            parallel=replace(config.parallel, world_size=workers, tp_size=workers),
            extra_config={**config.extra_config, SHAPE_KEY: CacheShape(groups=groups, num_shards=shards)},
        )
    )
    assert spec.chunk_bytes == shares * CHUNK_BYTES
    assert spec.parallelism == ("canonical v1" if is_canonical else f"tp={workers} pcp=1 dcp=1")
