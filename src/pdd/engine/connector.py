"""vLLM's offloading connector, which first says what the model's KV cache is.

Only the connector is told; the offloading spec and the tier, which need to know, get the words of
``pdd.engine.shape`` through the extra configuration. What PDD cannot move is refused here, in every process
of the engine, before any host memory is set aside.

Source:
    vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py and .../offloading/config.py@0.32.0
    (``build_offloading_config`` for which groups are offloaded).
"""

from collections.abc import Sequence
from typing import Any

import torch

from pdd.engine.command import CARRIERS
from pdd.engine.shape import SAMPLER_KEY, SHAPE_KEY, CacheGroup, CacheShape, Kind
from pdd.engine.support import check_shape
from pdd.engine.vllm_api import (
    FullAttentionSpec,
    KVConnectorRole,
    MLAAttentionSpec,
    OffloadingConnector,
    SlidingWindowSpec,
    current_platform,
    iter_layer_specs,
    offloaded_group_ids,
)


class PddConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's offloading connector for models whose KV PDD can move."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """The connector exists, and spec and tier know the shape of the KV cache.

        Raises:
            UnsupportedModelError: If PDD cannot move such KV.
        """
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        shape = cache_shape(vllm_config, kv_cache_config)
        check_shape(
            shape,
            model=str(vllm_config.model_config.model),
            blocks_per_chunk=int(extra_config.get("blocks_per_chunk", 1)),
        )
        extra_config[SHAPE_KEY] = shape
        extra_config[SAMPLER_KEY] = sampler(vllm_config.model_config.logits_processors)
        if not str(vllm_config.cache_config.kv_cache_layout).startswith("LB"):
            # Layers share each block's memory: vLLM has no canonical order for that, and would not start.
            extra_config["canonical_layout"] = False
        super().__init__(vllm_config, role, kv_cache_config)


def cache_shape(vllm_config: Any, kv_cache_config: Any) -> CacheShape:
    """The KV cache of an engine with this configuration."""
    groups, shards = [], set()
    total_heads = vllm_config.model_config.get_total_num_kv_heads()
    for group_id in offloaded_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        specs = list(iter_layer_specs(group.kv_cache_spec))
        kinds = {_kind(spec) for spec in specs}
        windows = {getattr(spec, "sliding_window", None) or 0 for spec in specs if _kind(spec) == Kind.WINDOW}
        retained = {getattr(spec, "extra_retained_tokens", 0) for spec in specs}
        groups.append(
            CacheGroup(
                kind="/".join(sorted(kinds)),
                block_tokens=group.kv_cache_spec.block_size,
                window_tokens=max(windows, default=0) + (max(retained) if windows else 0),
                is_draft=bool(group.is_eagle_group),
            )
        )
        shards |= {_num_shards(spec, total_heads) for spec in specs}
    text_config = vllm_config.model_config.hf_text_config
    is_on_cpu = bool(current_platform.is_cpu())
    return CacheShape(
        groups=tuple(groups),
        num_shards=max(shards),
        keeps_all=vllm_config.cache_config.prefix_cache_retention_interval is None,
        is_latent_model=getattr(text_config, "kv_lora_rank", None) is not None,
        is_on_cpu=is_on_cpu,
        has_amx=is_on_cpu and bool(torch.cpu._is_amx_tile_supported()),  # noqa: SLF001  # vLLM's own test
    )


def sampler(logits_processors: Sequence[Any] | None) -> str:
    """How an engine with these processors continues penalties and seeds; empty if it does not.

    An engine whose processors do not fit its model runner would not start.
    """
    loaded = {name for name in logits_processors or () if isinstance(name, str)}
    return next((name for name, classes in CARRIERS.items() if loaded.issuperset(classes)), "")


def _kind(spec: Any) -> str:
    # Subclasses of these keep something else than their parents, so that only the very class counts.
    kinds = {FullAttentionSpec: Kind.FULL, SlidingWindowSpec: Kind.WINDOW, MLAAttentionSpec: Kind.LATENT}
    return kinds.get(type(spec), type(spec).__name__)


def _num_shards(spec: Any, total_heads: int) -> int:
    if isinstance(spec, MLAAttentionSpec) or not getattr(spec, "num_kv_heads", 0):
        return 1
    return max(1, int(total_heads) // int(spec.num_kv_heads))
