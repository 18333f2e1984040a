"""The CPU backend's copies, against a reference that moves one block at a time."""

import random
from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from pdd.engine.host_copy import HostCopyWorker, block_pairs  # noqa: E402
from pdd.engine.vllm_api import BlockIDsLoadStoreSpec, CanonicalKVCaches, GPULoadStoreSpec  # noqa: E402


class Region:
    """A host region in ordinary memory, laid out as vLLM's: strided rows, with padding behind them."""

    def __init__(self, num_chunks: int, row_bytes: int) -> None:
        self.memory = torch.zeros((num_chunks, row_bytes), dtype=torch.int8)
        self.used = 0
        self.cleaned = 0

    def create_next_worker_view(self, num_bytes: int) -> Any:
        view = self.memory[:, self.used : self.used + num_bytes]
        self.used += num_bytes
        return view

    def cleanup(self) -> None:
        self.cleaned += 1


class Cache:
    """Cache tensors of several groups; each page has padding that must not be copied."""

    def __init__(
        self, groups: list[list[int]], num_blocks: int, blocks_per_chunk: int, num_chunks: int
    ) -> None:
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCacheTensor

        generator = torch.Generator().manual_seed(1)
        self.tensors = []
        refs: list[list[Any]] = []
        for pages in groups:
            refs.append([])
            for page in pages:
                tensor = torch.randint(-128, 128, (num_blocks, page), dtype=torch.int8, generator=generator)
                refs[-1].append(CanonicalKVCacheRef(len(self.tensors), page - 2))
                self.tensors.append(tensor)
        self.refs = refs
        self.blocks_per_chunk = blocks_per_chunk
        self.region = Region(num_chunks, sum(map(sum, groups)) * blocks_per_chunk + 5)
        self.worker = HostCopyWorker(
            kv_caches=CanonicalKVCaches(
                tensors=[CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in self.tensors],
                group_data_refs=refs,
            ),
            blocks_per_chunk=blocks_per_chunk,
            region=self.region,  # type: ignore[arg-type]
        )

    def naive(self, cache_spec: Any, chunk_ids: list[int], *, to_host: bool) -> tuple[Any, list[Any]]:
        """What the region and the cache should hold afterwards, block by block."""
        memory, tensors = self.region.memory.clone(), [tensor.clone() for tensor in self.tensors]
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + tensor.shape[1] * self.blocks_per_chunk)
        block_at = chunk_at = 0
        for refs, size, first in zip(
            self.refs, cache_spec.group_sizes, cache_spec.block_indices, strict=True
        ):
            for i in range(size):
                logical = first + i
                chunk = chunk_ids[
                    chunk_at + logical // self.blocks_per_chunk - first // self.blocks_per_chunk
                ]
                block = int(cache_spec.block_ids[block_at + i])
                for ref in refs:
                    page = tensors[ref.tensor_idx].shape[1]
                    at = starts[ref.tensor_idx] + logical % self.blocks_per_chunk * page
                    if to_host:
                        memory[chunk, at : at + ref.page_size_bytes] = tensors[ref.tensor_idx][
                            block, : ref.page_size_bytes
                        ]
                    else:
                        tensors[ref.tensor_idx][block, : ref.page_size_bytes] = memory[
                            chunk, at : at + ref.page_size_bytes
                        ]
            block_at += size
            if size:
                chunk_at += (first + size - 1) // self.blocks_per_chunk - first // self.blocks_per_chunk + 1
        return memory, tensors


GROUPS = [[[8]], [[8, 12]], [[8, 8], [12]], [[6], [10, 4], [8]]]


def transfer(
    random_: random.Random, groups: int, blocks_per_chunk: int, num_blocks: int, num_chunks: int
) -> tuple[Any, list[int]]:
    sizes = [random_.randrange(0, 6) for _ in range(groups)]
    firsts = [random_.randrange(0, 9) for _ in range(groups)]
    blocks = random_.sample(range(num_blocks), sum(sizes))
    needed = sum(
        (first + size - 1) // blocks_per_chunk - first // blocks_per_chunk + 1
        for first, size in zip(firsts, sizes, strict=True)
        if size
    )
    return GPULoadStoreSpec(blocks, sizes, firsts), random_.sample(range(num_chunks), needed)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("to_host", [True, False])
def test_copies_equal_a_naive_reference(
    groups: list[list[int]], blocks_per_chunk: int, to_host: bool
) -> None:
    random_ = random.Random(7)
    cache = Cache(groups, num_blocks=32, blocks_per_chunk=blocks_per_chunk, num_chunks=40)
    cache.region.memory.random_(-128, 128)
    for job in range(20):
        cache_spec, chunks = transfer(random_, len(groups), blocks_per_chunk, 32, 40)
        expected = cache.naive(cache_spec, chunks, to_host=to_host)
        host_spec = BlockIDsLoadStoreSpec(chunks)
        if to_host:
            assert cache.worker.submit_store(job, cache_spec, host_spec)
        else:
            assert cache.worker.submit_load(job, host_spec, cache_spec)
        assert torch.equal(cache.region.memory, expected[0])
        assert all(torch.equal(a, b) for a, b in zip(cache.tensors, expected[1], strict=True))
        (result,) = cache.worker.get_finished()
        assert (result.job_id, result.success) == (job, True)
        assert cache.worker.get_finished() == []


def test_a_store_and_a_load_return_the_same_bytes() -> None:
    cache = Cache([[16], [8]], num_blocks=16, blocks_per_chunk=2, num_chunks=8)
    before = [tensor.clone() for tensor in cache.tensors]
    cache.worker.submit_store(
        1, GPULoadStoreSpec([1, 2, 3, 4], [3, 1], [1, 0]), BlockIDsLoadStoreSpec([5, 0, 7])
    )
    for tensor in cache.tensors:
        tensor.zero_()
    cache.worker.submit_load(
        2, BlockIDsLoadStoreSpec([5, 0, 7]), GPULoadStoreSpec([9, 8, 7, 6], [3, 1], [1, 0])
    )
    assert torch.equal(cache.tensors[0][[9, 8, 7], :14], before[0][[1, 2, 3], :14])
    assert torch.equal(cache.tensors[1][6, :6], before[1][4, :6])


@pytest.mark.parametrize("chunks", [[], [1], [1, 2, 3]])
def test_too_few_or_too_many_chunks_are_refused(chunks: list[int]) -> None:
    with pytest.raises(ValueError, match="chunks"):
        list(block_pairs([1, 2, 3], chunks, [3], [1], 2))


def test_an_empty_transfer_finishes() -> None:
    cache = Cache([[8]], num_blocks=4, blocks_per_chunk=1, num_chunks=4)
    assert cache.worker.submit_store(3, GPULoadStoreSpec([], [0], [0]), BlockIDsLoadStoreSpec([]))
    assert [result.job_id for result in cache.worker.get_finished()] == [3]


def test_shutdown_releases_the_region_once() -> None:
    cache = Cache([[8]], num_blocks=4, blocks_per_chunk=1, num_chunks=4)
    cache.worker.wait({1, 2})
    cache.worker.shutdown()
    cache.worker.shutdown()
    assert cache.region.cleaned == 1
