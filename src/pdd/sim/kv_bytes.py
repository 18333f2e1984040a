"""Bytes of KV cache a token and a request take, from the model's configuration and the cache's layout.

Owns the layouts: grouped-query attention, MLA (plain and the packed fp8 layout), DeepSeek's indexers,
sliding windows, linear-attention state, and DeepSeek-V4's compressed layers. Knows no engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdd.core.errors import ConfigurationError
from pdd.sim.model import head_dim, need

KvLayout = Literal["bf16", "fp8", "fp8_mla"]
IndexerLayout = Literal["default", "bf16", "fp8", "fp4", "none"]

FP8_MLA_ENTRY_BYTES = 656
"""512 fp8 latents, 4 float32 scales, 64 bf16 rotary values: vLLM's packed MLA layout."""
INDEXER_SCALE_BYTES = 4
"""One float32 scale beside each quantised indexer key."""
FP8_COMPRESSED_ROPE = 64
"""Rotary values that stay bf16 in DeepSeek-V4's fp8 entry."""
FP8_COMPRESSED_SCALE_BYTES = 8
"""Scale bytes in DeepSeek-V4's fp8 entry: one per 64 of its 448 fp8 values, padded to 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFootprint:
    """What a request's KV cache weighs.

    Args:
        bytes_per_token: Grows with every token of the prompt.
        window_bytes_per_token: Of the layers that keep only the last tokens.
        window_tokens: How many they keep; 0 if there are none.
        state_bytes: Fixed recurrent state of linear-attention layers.
        selected_bytes_per_token: Of ``bytes_per_token``, what a decode step reads only of the tokens that an
            indexer selects.
        selected_tokens: How many it selects; 0 without an indexer.
    """

    bytes_per_token: float
    window_bytes_per_token: float = 0.0
    window_tokens: int = 0
    state_bytes: float = 0.0
    selected_bytes_per_token: float = 0.0
    selected_tokens: int = 0

    def request_bytes(self, tokens: float) -> float:
        """All of a request's KV cache."""
        return tokens * self.bytes_per_token + self.fixed_bytes(tokens)

    def delta_bytes(self, tokens: float, cached_tokens: float) -> float:
        """What an engine lacks that holds the first ``cached_tokens``: windows and state go whole."""
        missing = max(0.0, tokens - cached_tokens)
        return missing * self.bytes_per_token + (self.fixed_bytes(tokens) if missing else 0.0)

    def fixed_bytes(self, tokens: float) -> float:
        """The part that stops growing: windows and recurrent state."""
        return min(tokens, self.window_tokens) * self.window_bytes_per_token + self.state_bytes


def kv_footprint(
    config: Mapping[str, Any], layout: KvLayout, *, indexer: IndexerLayout = "default"
) -> KvFootprint:
    """The footprint of a model under a layout.

    Args:
        config: Hugging Face ``config.json`` (of the text model).
        layout: ``bf16``, ``fp8`` (one byte an element), or ``fp8_mla`` (packed MLA entry with scales).
        indexer: Layout of the sparse-attention indexer's keys; ``default`` follows ``layout``.

    Raises:
        ConfigurationError: If the layout does not exist for this model.
    """
    if config.get("compress_ratios"):
        return _compressed(config, layout, indexer)
    if config.get("kv_lora_rank"):
        return _mla(config, layout, indexer)
    if layout == "fp8_mla":
        raise ConfigurationError("model.kv_layout fp8_mla exists only for MLA models; expected bf16 or fp8")
    return _gqa(config, 2 if layout == "bf16" else 1)


def _gqa(config: Mapping[str, Any], element_bytes: int) -> KvFootprint:
    layers = need(config, "num_hidden_layers")
    per_layer = 2 * need(config, "num_key_value_heads") * head_dim(config) * element_bytes
    kinds = config.get("layer_types") or ["full_attention"] * layers
    full, sliding = (sum(kind == name for kind in kinds) for name in ("full_attention", "sliding_attention"))
    linear = sum(kind == "linear_attention" for kind in kinds)
    if full + sliding + linear != len(kinds) or len(kinds) != layers:
        raise ConfigurationError(
            f"model config: layer_types must name {layers} layers, each full_attention, sliding_attention "
            f"or linear_attention"
        )
    return KvFootprint(
        bytes_per_token=full * per_layer,
        window_bytes_per_token=sliding * per_layer,
        window_tokens=need(config, "sliding_window") if sliding else 0,
        state_bytes=linear * _linear_state_bytes(config) if linear else 0,
    )


def _linear_state_bytes(config: Mapping[str, Any]) -> int:
    """Recurrent matrix and convolution tail of one gated delta-net layer, in bf16 whatever the KV dtype."""
    keys = need(config, "linear_num_key_heads") * need(config, "linear_key_head_dim")
    values = need(config, "linear_num_value_heads") * need(config, "linear_value_head_dim")
    recurrent = values * need(config, "linear_key_head_dim")
    convolution = (2 * keys + values) * (need(config, "linear_conv_kernel_dim") - 1)
    return 2 * (recurrent + convolution)


def _indexer_bytes(config: Mapping[str, Any], layout: KvLayout, indexer: IndexerLayout) -> int:
    if indexer == "none" or not config.get("index_head_dim"):
        return 0
    width = need(config, "index_head_dim")
    if indexer == "bf16" or (indexer == "default" and layout == "bf16"):
        return 2 * width
    return (width // 2 if indexer == "fp4" else width) + INDEXER_SCALE_BYTES


def _mla(config: Mapping[str, Any], layout: KvLayout, indexer: IndexerLayout) -> KvFootprint:
    layers = need(config, "num_hidden_layers")
    width = need(config, "kv_lora_rank") + need(config, "qk_rope_head_dim")
    entry = FP8_MLA_ENTRY_BYTES if layout == "fp8_mla" else width * (2 if layout == "bf16" else 1)
    indexers = int(config.get("num_indexer_layers") or layers)
    top_k = int(config.get("index_topk") or 0)
    return KvFootprint(
        bytes_per_token=layers * entry + indexers * _indexer_bytes(config, layout, indexer),
        selected_bytes_per_token=layers * entry if top_k else 0.0,
        selected_tokens=top_k,
    )


def _compressed(config: Mapping[str, Any], layout: KvLayout, indexer: IndexerLayout) -> KvFootprint:
    """DeepSeek-V4: every layer keeps a window uncompressed; older tokens are merged by the layer's ratio.

    Layers of the smallest ratio also keep an indexer, one key a merged entry.
    """
    ratios = [int(ratio) for ratio in config["compress_ratios"]]
    width = head_dim(config)
    fp8_entry = (width - FP8_COMPRESSED_ROPE) + 2 * FP8_COMPRESSED_ROPE + FP8_COMPRESSED_SCALE_BYTES
    entry = 2 * width if layout == "bf16" else fp8_entry
    indexed = min(ratios)
    index = _indexer_bytes(config, layout, indexer)
    return KvFootprint(
        bytes_per_token=sum((entry + (index if ratio == indexed else 0)) / ratio for ratio in ratios),
        window_bytes_per_token=len(ratios) * entry,
        window_tokens=need(config, "sliding_window"),
    )
