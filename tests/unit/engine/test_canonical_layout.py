"""A chunk's bytes do not depend on tensor parallelism: what one degree wrote, every other reads."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (  # noqa: E402
    derive_canonical_mappings,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor  # noqa: E402

from pdd.core.errors import ConfigurationError, UnsupportedModelError  # noqa: E402
from pdd.engine import connector  # noqa: E402
from pdd.engine.command import CARRIERS  # noqa: E402
from pdd.engine.host_copy import HostCopyWorker, check_portable  # noqa: E402
from pdd.engine.shape import Kind  # noqa: E402
from pdd.engine.vllm_api import (  # noqa: E402
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    KVConnectorRole,
)

NUM_BLOCKS, NUM_CHUNKS, BLOCK_TOKENS, HEAD_DIM = 12, 10, 4, 3
ROW_BYTES = 1 << 13


class Region:
    """Host memory that all workers of all engines here share."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.used = 0

    def create_next_canonical_view(self, num_bytes: int) -> Any:
        view = self.memory[:, self.used : self.used + num_bytes]
        self.used += num_bytes
        return view

    def cleanup(self) -> None:
        pass


class Engine:
    """The workers of one engine: ``caches[rank][layer]`` is (blocks, heads, tokens, keys and values)."""

    def __init__(self, memory: Any, tp: int, layers: list[int], blocks_per_chunk: int) -> None:
        self.tp, self.layers = tp, layers
        self.caches: list[list[Any]] = []
        self.workers = []
        for rank in range(tp):
            tensors = [
                torch.zeros((NUM_BLOCKS, max(1, heads // tp), BLOCK_TOKENS, 2 * HEAD_DIM)) for heads in layers
            ]
            self.caches.append(tensors)
            kv_caches = CanonicalKVCaches(
                tensors=[CanonicalKVCacheTensor(t, t[0].nbytes) for t in tensors],
                group_data_refs=[
                    [
                        CanonicalKVCacheRef(i, t[0].nbytes, mapping(t, heads, tp, rank))
                        for i, (t, heads) in enumerate(zip(tensors, layers, strict=True))
                    ]
                ],
            )
            self.workers.append(
                HostCopyWorker(
                    kv_caches=kv_caches,
                    blocks_per_chunk=blocks_per_chunk,
                    region=Region(memory),  # type: ignore[arg-type]
                    is_canonical=True,
                )
            )
        self.num_bytes = self.workers[0]._region.used  # type: ignore[union-attr]

    def share(self, rank: int, heads: int) -> slice:
        """The heads of all that a worker has."""
        own = max(1, heads // self.tp)
        first = rank * heads // self.tp
        return slice(first, first + own)

    def write(self, values: list[np.ndarray], blocks: list[int]) -> None:
        """The cache blocks hold these values of all heads, each worker its share."""
        for rank, tensors in enumerate(self.caches):
            for tensor, heads, all_heads in zip(tensors, self.layers, values, strict=True):
                tensor[blocks] = torch.from_numpy(all_heads[:, self.share(rank, heads)])

    def check(self, values: list[np.ndarray], blocks: list[int]) -> None:
        for rank, tensors in enumerate(self.caches):
            for tensor, heads, all_heads in zip(tensors, self.layers, values, strict=True):
                np.testing.assert_array_equal(tensor[blocks].numpy(), all_heads[:, self.share(rank, heads)])

    def store(self, blocks: list[int], chunks: list[int], first: int) -> None:
        for worker in self.workers:
            worker.submit_store(
                1, GPULoadStoreSpec(blocks, [len(blocks)], [first]), BlockIDsLoadStoreSpec(chunks)
            )

    def load(self, blocks: list[int], chunks: list[int], first: int) -> None:
        for worker in self.workers:
            worker.submit_load(
                1, BlockIDsLoadStoreSpec(chunks), GPULoadStoreSpec(blocks, [len(blocks)], [first])
            )


def mapping(tensor: Any, heads: int, tp: int, rank: int) -> Any:
    """What vLLM says about a layer of so many KV heads on one worker."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=tensor.shape[1], head_size=HEAD_DIM, dtype=torch.float32
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=tp,
            rank=rank,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )
    caches = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return derive_canonical_mappings(config, caches, {"layer": tensor})["layer"]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_what_one_degree_of_tensor_parallelism_wrote_every_other_reads(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([1, 2, 4, 8]), label="KV heads")
    layers = [heads] * data.draw(st.integers(1, 3), label="layers")
    blocks_per_chunk = data.draw(st.integers(1, 3), label="blocks per chunk")
    writer_tp, reader_tp = (
        data.draw(st.sampled_from([1, 2, 4]), label=name) for name in ("writer", "reader")
    )
    first = data.draw(st.integers(0, 4), label="place of the first block")
    num_blocks = data.draw(st.integers(1, 6), label="blocks")
    num_chunks = (first + num_blocks - 1) // blocks_per_chunk - first // blocks_per_chunk + 1
    blocks, back = (data.draw(st.permutations(range(NUM_BLOCKS)))[:num_blocks] for _ in range(2))
    chunks = data.draw(st.permutations(range(NUM_CHUNKS)))[:num_chunks]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = (num_blocks, heads, BLOCK_TOKENS, 2 * HEAD_DIM)
    values = [random.standard_normal(shape).astype(np.float32) for _ in layers]

    rows = []
    for tp in (writer_tp, 1):
        memory = torch.full((NUM_CHUNKS, ROW_BYTES), 7, dtype=torch.int8)
        engine = Engine(memory, tp, layers, blocks_per_chunk)
        engine.write(values, blocks)
        engine.store(blocks, chunks, first)
        rows.append((engine.num_bytes, memory.numpy().tobytes()))
    assert rows[0] == rows[1]

    memory = torch.frombuffer(bytearray(rows[0][1]), dtype=torch.int8).view(NUM_CHUNKS, ROW_BYTES)
    reader = Engine(memory, reader_tp, layers, blocks_per_chunk)
    reader.load(back, chunks, first)
    reader.check(values, back)


def test_a_layer_without_a_portable_layout_is_refused_at_start() -> None:
    tensor = torch.zeros((NUM_BLOCKS, 3, BLOCK_TOKENS, 2 * HEAD_DIM))
    opaque = mapping(tensor, 8, 2, 0)  # three heads a worker are no half of eight
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor, tensor[0].nbytes)],
        group_data_refs=[[CanonicalKVCacheRef(0, tensor[0].nbytes, opaque)]],
    )
    with pytest.raises(ConfigurationError, match="tensor parallelism"):
        check_portable(caches)


def kv_config(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return SimpleNamespace(
        kv_cache_groups=groups,
        hisparse_host_num_blocks=None,
        prefix_cacheable_group_ids=tuple(range(len(groups))),
    )


def model_config(heads: int) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: heads, model="org/m", hf_text_config=SimpleNamespace()
        ),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"blocks_per_chunk": 1}),
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None),
    )


def test_the_shape_says_kinds_windows_and_shares() -> None:
    common: dict[str, Any] = {"block_size": 32, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(num_kv_heads=2, **common)
    window = SlidingWindowSpec(num_kv_heads=2, sliding_window=80, **common)
    latent = MLAAttentionSpec(num_kv_heads=1, **common)
    shape = connector.cache_shape(model_config(8), kv_config(window, full))
    assert [(group.kind, group.window_tokens, group.block_tokens) for group in shape.groups] == [
        (Kind.WINDOW, 80, 32),
        (Kind.FULL, 0, 32),
    ]
    assert str(shape) == "window(80)+full"
    assert shape.num_shards == 4
    assert shape.is_on_cpu
    assert connector.cache_shape(model_config(2), kv_config(full)).num_shards == 1
    assert connector.cache_shape(model_config(128), kv_config(latent)).num_shards == 1
    assert str(connector.cache_shape(model_config(1), kv_config(latent))) == "latent"


def test_the_connector_says_how_penalties_and_seeds_go_on() -> None:
    penalties, draws = CARRIERS["v1"]
    assert connector.sampler([draws, "mine:Own", penalties]) == "v1"
    assert connector.sampler(CARRIERS["v2"]) == "v2"
    for lacking in (None, [], [penalties], ["mine:Own"], [SimpleNamespace]):
        assert connector.sampler(lacking) == ""


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_model_that_cannot_be_moved_stops_every_process_of_the_engine(role: Any) -> None:
    state = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    full = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"org/m \(KV cache MambaSpec\+full\)"):
        connector.PddConnector(model_config(2), role, kv_config(state, full))
