"""Copies KV blocks between the CPU backend's KV cache and the host memory shared with the tiers.

vLLM's own worker copies between a GPU and the host and refuses other devices; on the CPU backend the "device"
is host memory too, so plain copies do. They run inside the step: 0.4 ms for a chunk of a small model, where
handing it to a thread cost 22 ms of waiting for the interpreter lock.

A chunk is ``blocks_per_chunk`` consecutive blocks. In the host region a chunk is one row; inside a row each
cache tensor has its own columns, block after block.

In the *canonical layout* a block's bytes in the row are those of an engine without tensor parallelism: each
worker writes its heads where they stand among all heads, and workers that hold copies of the same heads take
turns. Which bytes go where is vLLM's word (``CanonicalPageMapping``). It takes a block as heads, each with
its tokens; what the CPU's kernels do inside a head stays as it is, since heads are moved whole.

Source:
    vllm/v1/kv_offload/cpu/gpu_worker.py@0.32.0 (``transfer_async``, ``compute_sub_block_ptrs``) for the order
    of blocks within groups, the skip inside a group's first chunk, and who writes what in the canonical
    layout; .../kv_connector/v1/offloading/canonical_mapping.py@0.32.0 for that layout.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pdd.core.errors import ConfigurationError
from pdd.engine.vllm_api import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CopyRun,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    SharedOffloadRegion,
    TransferResult,
)


def block_pairs(
    block_ids: list[int],
    chunk_ids: list[int],
    group_sizes: list[int],
    block_indices: list[int],
    blocks_per_chunk: int,
) -> Iterator[tuple[int, int, int, int]]:
    """Yields ``(group, block_id, chunk_id, place in the chunk)`` for every block of a transfer.

    Args:
        block_ids: Cache blocks, group after group.
        chunk_ids: Rows of the host region, group after group.
        group_sizes: Blocks of each KV cache group.
        block_indices: Place of each group's first block in its request, in blocks; tells how many blocks of
            the group's first chunk are skipped.
        blocks_per_chunk: Blocks in one row.

    Raises:
        ValueError: If there are fewer or more chunks than the blocks fill.
    """
    block_at = chunk_at = 0
    for group, (size, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        if not size:
            continue
        skip = first % blocks_per_chunk
        num_chunks = -(-(size + skip) // blocks_per_chunk)
        if chunk_at + num_chunks > len(chunk_ids):
            raise ValueError(f"group {group} needs {num_chunks} chunks: {len(chunk_ids) - chunk_at} are left")
        for i in range(size):
            chunk, place = divmod(skip + i, blocks_per_chunk)
            yield group, block_ids[block_at + i], chunk_ids[chunk_at + chunk], place
        block_at += size
        chunk_at += num_chunks
    if block_at != len(block_ids) or chunk_at != len(chunk_ids):
        raise ValueError(
            f"{len(block_ids)} blocks and {len(chunk_ids)} chunks: {block_at} and {chunk_at} used"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Where one layer's bytes are on both sides; ``runs`` are equal numbers of pieces of equal size.

    A cache piece is found by block, a host piece by chunk and place. Of blocks that several workers hold,
    this one stores those whose number in the region, divided by ``num_writers``, leaves ``writer_index``.
    """

    runs: list[tuple[Any, Any]]
    num_bytes: int
    num_writers: int = 1
    writer_index: int = 0


def _layer(cache: Any, host: Any, ref: CanonicalKVCacheRef, *, is_canonical: bool) -> _Layer:
    """The layer's bytes in its cache tensor (blocks, bytes) and its columns (chunks, places, bytes)."""
    size = ref.page_size_bytes
    if not is_canonical:
        whole = CopyRun(0, 0, size, 1, size, size)
        return _Layer(runs=[_pieces(cache, host, whole)], num_bytes=size)
    mapping = ref.mapping
    assert mapping is not None
    return _Layer(
        runs=[_pieces(cache, host, run) for run in mapping.runs],
        num_bytes=sum(run.fragment_size * run.num_fragments for run in mapping.runs),
        num_writers=mapping.num_writers,
        writer_index=mapping.writer_index,
    )


def _pieces(cache: Any, host: Any, run: CopyRun) -> tuple[Any, Any]:
    return (
        cache.as_strided(
            (cache.shape[0], run.num_fragments, run.fragment_size),
            (cache.stride(0), run.local_stride, 1),
            cache.storage_offset() + run.local_offset,
        ),
        host.as_strided(
            (*host.shape[:2], run.num_fragments, run.fragment_size),
            (host.stride(0), host.stride(1), run.canonical_stride, 1),
            host.storage_offset() + run.canonical_offset,
        ),
    )


def check_portable(kv_caches: CanonicalKVCaches) -> None:
    """Every layer's bytes in the canonical layout are the same under any tensor parallelism.

    Raises:
        ConfigurationError: If not, though vLLM's configuration, and so the fingerprint, says so.
    """
    for ref in (ref for group in kv_caches.group_data_refs for ref in group):
        if ref.mapping is None or not ref.mapping.parallelism_agnostic:
            raise ConfigurationError(
                "the KV cache of some layer has no layout that is independent of tensor parallelism on the "
                "CPU backend: serve it without tensor parallelism (and without context parallelism)"
            )


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not typed here
    """The CPU backend's offloading worker; owns the host region and releases it in ``shutdown``."""

    def __init__(
        self,
        *,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
        is_canonical: bool = False,
    ) -> None:
        """Copies are possible.

        Args:
            kv_caches: The engine's cache tensors, blocks first, and which groups use which.
            blocks_per_chunk: Blocks in one row of the region.
            region: Host memory shared with the tiers, rows being chunks.
            is_canonical: Whether rows are in the canonical layout, which all workers share; else each worker
                has a part of every row.
        """
        self._region: SharedOffloadRegion | None = region
        self._blocks_per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []
        cache: list[Any] = []
        host: list[Any] = []
        for i, tensor in enumerate(kv_caches.tensors):
            page_bytes = tensor.page_size_bytes
            cache.append(tensor.tensor.view(torch.int8).view(-1, page_bytes))
            if is_canonical:
                refs = [ref for group in kv_caches.group_data_refs for ref in group if ref.tensor_idx == i]
                page_bytes = max(ref.mapping.canonical_page_size_bytes for ref in refs)
                rows = region.create_next_canonical_view(page_bytes * blocks_per_chunk)
            else:
                rows = region.create_next_worker_view(page_bytes * blocks_per_chunk)
            # The rows are strided, so this splits them without copying.
            host.append(rows.unflatten(1, (blocks_per_chunk, page_bytes)))
        self._groups = [
            [
                _layer(cache[ref.tensor_idx], host[ref.tensor_idx], ref, is_canonical=is_canonical)
                for ref in refs
            ]
            for refs in kv_caches.group_data_refs
        ]

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """The blocks are in the host region; the job's result waits in ``get_finished``."""
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """The blocks are in the cache; the job's result waits in ``get_finished``."""
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        """The results of all jobs since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """All jobs have ended: copies end before their submission returns."""

    def shutdown(self) -> None:
        """The host region is unmapped; a second call does nothing."""
        # The region cannot be unmapped while a tensor still points into it.
        self._groups = []
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _copy(
        self, job_id: int, cache_spec: GPULoadStoreSpec, host_spec: LoadStoreSpec, *, to_host: bool
    ) -> bool:
        assert isinstance(host_spec, BlockIDsLoadStoreSpec)
        started_s = time.perf_counter()
        pairs: list[list[tuple[int, int, int]]] = [[] for _ in self._groups]
        for group, block, chunk, place in block_pairs(
            cache_spec.block_ids.tolist(),
            host_spec.block_ids.tolist(),
            list(cache_spec.group_sizes),
            list(cache_spec.block_indices),
            self._blocks_per_chunk,
        ):
            pairs[group].append((block, chunk, place))
        num_bytes = 0
        for group_pairs, layers in zip(pairs, self._groups, strict=True):
            if not group_pairs:
                continue
            ids = torch.tensor(group_pairs)
            for layer in layers:
                num_bytes += self._copy_layer(layer, ids, to_host=to_host)
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=num_bytes,
                transfer_time=time.perf_counter() - started_s,
            )
        )
        return True

    def _copy_layer(self, layer: _Layer, ids: Any, *, to_host: bool) -> int:
        """The blocks of one layer are copied; returns how many bytes those are.

        Args:
            layer: Whose blocks.
            ids: A row per block: cache block, chunk, place.
            to_host: The direction.
        """
        if to_host and layer.num_writers > 1:
            numbers = ids[:, 1] * self._blocks_per_chunk + ids[:, 2]
            ids = ids[numbers % layer.num_writers == layer.writer_index]
        blocks, chunks, places = ids.unbind(1)
        for cache, host in layer.runs:
            if to_host:
                host[chunks, places] = cache[blocks]
            else:
                cache[blocks] = host[chunks, places]
        return len(ids) * layer.num_bytes
