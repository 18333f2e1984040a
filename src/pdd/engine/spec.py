"""The offloading spec PDD's engines are started with: vLLM's tiering spec, plus the CPU backend and refusals.

GPUs keep vLLM's own worker. What PDD cannot serve is refused while the engine starts, with the reason, since
vLLM would go on and the far engine would load bytes that mean something else.
"""

import contextlib
from pathlib import Path

import torch

from pdd.engine.host_copy import HostCopyWorker, check_portable
from pdd.engine.shape import SHAPE_KEY, CacheShape
from pdd.engine.support import check_supported
from pdd.engine.vllm_api import (
    CanonicalKVCaches,
    OffloadingConfig,
    OffloadingManager,
    OffloadingWorker,
    SharedOffloadRegion,
    TieringOffloadingSpec,
    canonical_layout_version,
    current_platform,
)


class PddOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's tiering spec, also for the CPU backend."""

    def __init__(self, config: OffloadingConfig) -> None:
        """The configuration is one PDD can serve.

        Raises:
            ConfigurationError: If it is not.
        """
        check_supported(config)
        super().__init__(config)
        self.shape: CacheShape = config.extra_config[SHAPE_KEY]
        self._host_worker: HostCopyWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The tiering manager exists, and the name of the shared host memory is gone.

        vLLM leaves ``/dev/shm/vllm_offload_*`` behind when it is killed. When the scheduler maps a file that
        a worker made, every worker has mapped it before (they are initialised together, before the scheduler
        is made), so from then on the name serves nobody.
        """
        first = self._manager is None
        manager = super().get_manager()
        region = self._scheduler_mmap
        if first and region is not None and not region._creator:  # noqa: SLF001  # no public word for it
            with contextlib.suppress(FileNotFoundError):
                Path(region.mmap_path).unlink()
        return manager

    @property
    def is_canonical(self) -> bool:
        """Whether a chunk's bytes are the same under any tensor parallelism."""
        return bool(self.config.canonical_layout and self.config.parallel.is_parallelism_agnostic)

    @property
    def parallelism(self) -> str:
        """For the fingerprint: how the workers share a chunk's bytes."""
        if self.is_canonical:
            return f"canonical v{canonical_layout_version()}"
        parallel = self.config.parallel
        return f"tp={parallel.tp_size} pcp={parallel.pcp_size} dcp={parallel.dcp_size}"

    @property
    def platform(self) -> str:
        """For the fingerprint: the device, on the CPU backend with what decides the order inside a block."""
        if not current_platform.is_cpu():
            return str(current_platform.device_type)
        return f"cpu/{torch.backends.cpu.get_cpu_capability()}{'+AMX' if self.shape.has_amx else ''}"

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row that mean something; the rest pads it, or is a second copy's place."""
        if self.is_canonical:
            num_shares = self.shape.num_shards
        else:
            num_shares = 1 if self.replicated_layout else self.config.parallel.world_size
        return int(self.cpu_page_size_per_worker) * num_shares

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker that copies between device and host: ours on the CPU backend, vLLM's on all others."""
        if current_platform.is_cpu():
            if self._host_worker is None:
                self._host_worker = self._create_host_worker(kv_caches)
            return self._host_worker
        worker = super().get_worker(kv_caches)
        if self._worker is not None:
            _leave_file_to_scheduler(self._worker._mmap_region)  # noqa: SLF001
        return worker

    def _create_host_worker(self, kv_caches: CanonicalKVCaches) -> HostCopyWorker:
        if self.is_canonical:
            check_portable(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            worker = HostCopyWorker(
                kv_caches=kv_caches,
                blocks_per_chunk=self.blocks_per_chunk,
                region=region,
                is_canonical=self.config.canonical_layout,
            )
        except Exception:
            region.cleanup()
            raise
        _leave_file_to_scheduler(region)
        return worker


def _leave_file_to_scheduler(region: SharedOffloadRegion | None) -> None:
    """The worker does not remove the file's name when it stops: ``get_manager`` has done so long before."""
    if region is not None:
        region._creator = False  # noqa: SLF001
