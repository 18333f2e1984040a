"""Every vLLM name PDD uses, in one place, and the vLLM versions that are known to have them.

No other module imports vLLM. When vLLM moves something, this file and its table change, nothing else.

Source:
    vllm/v1/kv_offload/base.py, v1/kv_offload/tiering/{base,spec,manager}.py, v1/kv_offload/config.py,
    v1/kv_offload/cpu/shared_offload_region.py, v1/core/kv_cache_utils.py, v1/kv_cache_interface.py,
    distributed/kv_transfer/kv_connector/v1/offloading_connector.py and the package beside it, v1/sample/**,
    v1/worker/gpu/sample/logits_processor/interface.py, model_executor/layers/utils.py@0.32.0.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from pdd.core.errors import ConfigurationError

SUPPORTED_VERSIONS: Final = {
    "0.32": "offloading tiers with load filters, request-level offload policy and key positions",
}
"""Release lines this package was tested with, and what of each it relies on."""


def check_vllm_version(installed: str | None = None) -> str:
    """The installed vLLM is of a supported release line.

    Args:
        installed: The version to check; default: that of the installed distribution.

    Returns:
        The version.

    Raises:
        ConfigurationError: If vLLM is missing or of another release line.
    """
    supported = ", ".join(f"{line}.*" for line in SUPPORTED_VERSIONS)
    if installed is None:
        try:
            installed = version("vllm")
        except PackageNotFoundError as error:
            raise ConfigurationError(f"vLLM is not installed; PDD needs vllm {supported}") from error
    if ".".join(installed.split("+")[0].split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise ConfigurationError(f"vllm {installed} is not supported; PDD needs vllm {supported}")
    return installed


check_vllm_version()

# Only now: with another version these lines would fail with a name nobody asked about.
from vllm.config import VllmConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # noqa: E402
from vllm.logger import init_logger  # noqa: E402
from vllm.model_executor.layers.utils import apply_penalties  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.kv_offload.base import (  # noqa: E402
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CopyRun,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingWorker,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.config import OffloadingConfig  # noqa: E402
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState  # noqa: E402
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor  # noqa: E402


def root_block_hash() -> bytes | None:
    """The hash that stands before a prompt's first block in this process; None until vLLM has set it.

    It depends on the hash algorithm and its seed and on nothing else, so it proves both.
    """
    root = getattr(kv_cache_utils, "NONE_HASH", None)
    return bytes(root) if root is not None else None


def expected_root_hash(algorithm: str, seed: str) -> bytes:
    """What ``root_block_hash`` is under this algorithm and ``PYTHONHASHSEED``."""
    return bytes(get_hash_fn_by_name(algorithm)(seed))


def canonical_layout_version() -> int:
    """The version of vLLM's order of bytes in a chunk that does not depend on parallelism."""
    return int(canonical_mapping.CANONICAL_FORMAT_VERSION)


def offloaded_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """The KV cache groups whose chunks reach the tiers; a key ends with its group's number."""
    return tuple(get_offloading_group_ids(kv_cache_config))


def keys_in_prefix_order(req_context: ReqContext) -> list[bytes]:
    """All chunk keys vLLM has worked out for a request so far, first chunk first."""
    positions: dict[bytes, int] = req_context._offload_key_positions  # noqa: SLF001  # asked one by one only
    return sorted(positions, key=positions.__getitem__)


__all__ = [
    "SUPPORTED_VERSIONS",
    "canonical_layout_version",
    "check_vllm_version",
    "expected_root_hash",
    "get_offload_group_idx",
    "iter_layer_specs",
    "keys_in_prefix_order",
    "offloaded_group_ids",
    "root_block_hash",
    "BatchUpdate",
    "BlockIDsLoadStoreSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCaches",
    "CopyRun",
    "FullAttentionSpec",
    "GPULoadStoreSpec",
    "JobResult",
    "KVConnectorRole",
    "LoadStoreSpec",
    "LogitsContext",
    "LogitsProcRequestState",
    "LookupResult",
    "MLAAttentionSpec",
    "Medium",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingConfig",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingGaugeMetadata",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingWorker",
    "ReqContext",
    "RequestOffloadingContext",
    "SamplingParams",
    "ScheduleEndContext",
    "SecondaryTierManager",
    "SharedOffloadRegion",
    "SlidingWindowSpec",
    "TieringOffloadingSpec",
    "TopKTopPSampler",
    "TransferJob",
    "TransferResult",
    "V1LogitsProcessor",
    "V2LogitsProcessor",
    "VllmConfig",
    "apply_penalties",
    "current_platform",
    "init_logger",
    "process_dict_updates",
]
