"""Reads a Hugging Face ``config.json`` and says what one token costs: weights, attention work and KV cache.

Owns the arithmetic of model shapes. Knows no chip and no time.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pdd.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Layers that attend in the same way.

    Args:
        layers: How many.
        flops_per_pair: Floating point operations per pair of query and visible key, in one layer.
        max_visible: Most keys one query attends to (window or top-k); None if all.
        stride: One key stands for so many tokens (compressed attention).
        flops_per_cached: Per cached token and layer, once a prefill chunk: expanding MLA's latent to keys and
            values.
        decode_flops_per_pair: As ``flops_per_pair`` in decode (MLA: on the latents); None: the same.
    """

    layers: int
    flops_per_pair: float
    max_visible: int | None = None
    stride: int = 1
    flops_per_cached: float = 0.0
    decode_flops_per_pair: float | None = None

    def flops_per_query(self, context_tokens: float) -> float:
        """Work of one prefill query over a context of that many tokens."""
        return self.layers * self.flops_per_pair * self._visible(context_tokens)

    def decode_flops(self, context_tokens: float) -> float:
        """Work of one decode step's query over a context."""
        pair = self.flops_per_pair if self.decode_flops_per_pair is None else self.decode_flops_per_pair
        return self.layers * pair * self._visible(context_tokens)

    def _visible(self, context_tokens: float) -> float:
        visible = context_tokens / self.stride
        return visible if self.max_visible is None else min(visible, self.max_visible)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the roofline needs of a model.

    Args:
        total_params: All weights.
        active_params: Weights one token multiplies with (embedding table excluded).
        expert_params: Weights of all routed experts, part of ``total_params``.
        experts: Routed experts per layer; 0 for a dense model.
        experts_per_token: Routed experts a token visits.
        hidden_size: Width of the residual stream.
        layers: Transformer layers.
        attention: Attention work by kind of layer.
    """

    total_params: float
    active_params: float
    expert_params: float
    experts: int
    experts_per_token: int
    hidden_size: int
    layers: int
    attention: tuple[AttentionGroup, ...]

    def attention_flops(self, query_tokens: float, cached_tokens: float) -> float:
        """Work of attention for a run of queries that follow a cached prefix (causal, trapezoid rule)."""
        first = sum(group.flops_per_query(cached_tokens) for group in self.attention)
        last = sum(group.flops_per_query(cached_tokens + query_tokens) for group in self.attention)
        expand = sum(group.layers * group.flops_per_cached for group in self.attention)
        return query_tokens * (first + last) / 2 + expand * cached_tokens

    def decode_flops(self, context_tokens: float) -> float:
        """Attention work of one decode step for one request of that context."""
        return sum(group.decode_flops(context_tokens) for group in self.attention)

    def touched_expert_ratio(self, tokens: float) -> float:
        """Expected share of the routed experts that at least one of ``tokens`` visits, routing being
        uniform.
        """
        if not self.experts:
            return 0.0
        return 1.0 - float((1.0 - self.experts_per_token / self.experts) ** tokens)


def load_model_config(name_or_path: str) -> dict[str, Any]:
    """The parsed ``config.json`` of a bundled model name, a file, or a folder that holds one.

    Raises:
        ConfigurationError: Naming the path and what was expected.
    """
    bundled = resources.files("pdd.sim") / "data" / "models" / f"{name_or_path}.json"
    path = Path(name_or_path)
    if bundled.is_file():
        text = bundled.read_text(encoding="utf-8")
    else:
        path = path / "config.json" if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"model.config {name_or_path!r}: neither a bundled model ({', '.join(bundled_models())}) "
                f"nor a readable config.json ({error.strerror})"
            ) from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: expected one JSON object, as in a Hugging Face config.json")
    return dict(value.get("text_config") or value)


def bundled_models() -> tuple[str, ...]:
    """Names of the model configurations that ship with PDD."""
    folder = resources.files("pdd.sim") / "data" / "models"
    return tuple(
        sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))
    )


def need(config: Mapping[str, Any], key: str) -> int:
    """A positive integer of the configuration.

    Raises:
        ConfigurationError: If the key is missing or no positive integer.
    """
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"model config: {key} must be a positive integer, but is {value!r}")
    return value


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of one attention head."""
    if config.get("head_dim"):
        return need(config, "head_dim")
    return need(config, "hidden_size") // need(config, "num_attention_heads")


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a GQA or MLA model, dense or with routed experts, from its configuration.

    Raises:
        ConfigurationError: If a needed key is missing; for such a model the scenario gives the figures
        itself.

    Source:
        Weight counts follow the published module shapes: gated feed-forward 3 x hidden x intermediate;
        attention projections q, k, v, o; MLA projections of DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    hidden, layers = need(config, "hidden_size"), need(config, "num_hidden_layers")
    attention = _attention_params(config)
    experts = int(
        config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0
    )
    per_token = int(config.get("num_experts_per_tok") or config.get("experts_per_token") or 0)
    dense_layers = int(config.get("first_k_dense_replace") or 0) if experts else layers
    moe_layers = layers - dense_layers
    dense = 3 * hidden * need(config, "intermediate_size") if dense_layers else 0
    expert = (
        3 * hidden * int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
        if experts
        else 0
    )
    shared = int(config.get("n_shared_experts") or 0) * expert
    head = hidden * need(config, "vocab_size")
    tables = head if config.get("tie_word_embeddings") else 2 * head
    every_token = layers * attention + dense_layers * dense + moe_layers * (shared + hidden * experts) + head
    return ModelShape(
        total_params=every_token - head + tables + moe_layers * experts * expert,
        active_params=every_token + moe_layers * per_token * expert,
        expert_params=moe_layers * experts * expert,
        experts=experts,
        experts_per_token=per_token,
        hidden_size=hidden,
        layers=layers,
        attention=_attention_groups(config),
    )


def _attention_params(config: Mapping[str, Any]) -> int:
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    if not config.get("kv_lora_rank"):
        dim = head_dim(config)
        return hidden * dim * (2 * heads + 2 * need(config, "num_key_value_heads"))
    rank, rope = need(config, "kv_lora_rank"), need(config, "qk_rope_head_dim")
    nope, value = need(config, "qk_nope_head_dim"), need(config, "v_head_dim")
    query_rank = int(config.get("q_lora_rank") or 0)
    query = (
        hidden * query_rank + query_rank * heads * (nope + rope)
        if query_rank
        else hidden * heads * (nope + rope)
    )
    return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _attention_groups(config: Mapping[str, Any]) -> tuple[AttentionGroup, ...]:
    layers, heads = need(config, "num_hidden_layers"), need(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        return _mla_groups(config, layers, heads)
    pair = 4 * heads * head_dim(config)
    kinds = config.get("layer_types") or []
    full = sum(kind == "full_attention" for kind in kinds) if kinds else layers
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    groups = [AttentionGroup(layers=full, flops_per_pair=pair)]
    if sliding:
        groups.append(
            AttentionGroup(layers=sliding, flops_per_pair=pair, max_visible=need(config, "sliding_window"))
        )
    return tuple(groups)


def _mla_groups(config: Mapping[str, Any], layers: int, heads: int) -> tuple[AttentionGroup, ...]:
    """MLA's two forms of one product.

    Expanded, the latents become keys and values of each head first: fewest operations per pair, but all
    cached latents are expanded again for each chunk. Absorbed, queries are brought to the latents' space:
    3.4 times the work per pair, nothing to expand. Engines prefill dense MLA expanded and decode it
    absorbed. Sparse MLA is absorbed throughout: each query selects its own keys, so nothing expanded would
    be shared.

    Source:
        DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C; vllm/model_executor/layers/attention/
        mla_attention.py@0.32.0 (``forward_mha``, ``forward_mqa``).
    """
    rank, rope = need(config, "kv_lora_rank"), need(config, "qk_rope_head_dim")
    nope, value = need(config, "qk_nope_head_dim"), need(config, "v_head_dim")
    expanded = 2 * heads * (nope + rope + value)
    absorbed = 2 * heads * (2 * rank + rope)
    top_k = config.get("index_topk")
    if not top_k:
        return (
            AttentionGroup(
                layers=layers,
                flops_per_pair=expanded,
                flops_per_cached=2 * rank * heads * (nope + value),
                decode_flops_per_pair=absorbed,
            ),
        )
    indexers = int(config.get("num_indexer_layers") or layers)
    index = 2 * need(config, "index_n_heads") * need(config, "index_head_dim")
    return (
        AttentionGroup(layers=layers, flops_per_pair=absorbed, max_visible=int(top_k)),
        AttentionGroup(layers=indexers, flops_per_pair=index),
    )
