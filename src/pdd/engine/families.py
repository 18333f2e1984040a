"""The tiny random models, one of each family people serve: configuration and weights, from a seed.

A random model with small weights emits one constant token and hides every KV fault. So the gains below are
chosen by trial: greedy answers vary, depend on the first token of the prompt, and rounding noise stays far
below a logit's usual lead. Importing this module costs nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_POSITIONS: Final = 8192
BOS_ID: Final = 1  # <|im_start|>
EOS_ID: Final = 2  # <|im_end|>

_HIDDEN: Final = 128
_MLP: Final = 256
_HEADS: Final = 4

MatrixFn = Callable[..., Any]
"""``(rows, columns, gain=1.0)``: random, so that a unit input has an output of about ``gain``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of attention, as a tiny model.

    ``config`` makes the transformers configuration for a vocabulary of that size, ``weights`` the tensors
    from that size and a seed.
    """

    name: str
    description: str
    config: Callable[[int], Any]
    weights: Callable[[int, int], dict[str, Any]]


def _common(vocab: int, num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "dtype": "float32",
    }


def _matrices(seed: int) -> MatrixFn:
    import numpy as np

    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain / columns**0.5)

    return matrix


def _constant(size: int, value: float) -> Any:
    import numpy as np

    return np.full(size, value, dtype=np.float32)


def _mlp(name: str, matrix: MatrixFn, gain: float) -> dict[str, Any]:
    return {
        f"{name}.mlp.gate_proj.weight": matrix(_MLP, _HIDDEN, gain=2.0),
        f"{name}.mlp.up_proj.weight": matrix(_MLP, _HIDDEN),
        f"{name}.mlp.down_proj.weight": matrix(_HIDDEN, _MLP, gain=gain),
    }


# Grouped-query attention, as in Llama and Qwen: query heads share fewer KV heads.

_GQA_LAYERS: Final = 4
_GQA_KV_HEADS: Final = 2
_GQA_HEAD_DIM: Final = 32
_GQA_GAIN: Final = 2.0
_GQA_MLP_GAIN: Final = 3.0
"""64 greedy tokens after prompts of 33 to 2000 tokens hold 63 or 64 different ones, another first token of
the prompt shows within two, and rounding noise stays a thousandth of a logit's usual lead. Larger attention
gains make short cycles, smaller ones hide the far end of the context."""


def _gqa_config(vocab: int) -> Any:
    from transformers import LlamaConfig

    values = _common(vocab, _GQA_LAYERS)
    config = LlamaConfig(**values, num_key_value_heads=_GQA_KV_HEADS, head_dim=_GQA_HEAD_DIM)
    config.architectures = ["LlamaForCausalLM"]
    return config


def _gqa_weights(vocab: int, seed: int) -> dict[str, Any]:
    matrix = _matrices(seed)
    heads, kv = _HEADS * _GQA_HEAD_DIM, _GQA_KV_HEADS * _GQA_HEAD_DIM
    tensors = {"model.embed_tokens.weight": matrix(vocab, _HIDDEN, gain=_HIDDEN**0.5)}
    for layer in range(_GQA_LAYERS):
        name = f"model.layers.{layer}"
        tensors[f"{name}.self_attn.q_proj.weight"] = matrix(heads, _HIDDEN, gain=_GQA_GAIN)
        tensors[f"{name}.self_attn.k_proj.weight"] = matrix(kv, _HIDDEN, gain=_GQA_GAIN)
        tensors[f"{name}.self_attn.v_proj.weight"] = matrix(kv, _HIDDEN)
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(_HIDDEN, heads, gain=_GQA_GAIN)
        tensors |= _mlp(name, matrix, _GQA_MLP_GAIN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = _constant(_HIDDEN, 1)
    tensors["model.norm.weight"] = _constant(_HIDDEN, 1)
    tensors["lm_head.weight"] = matrix(vocab, _HIDDEN, gain=4.0)
    return tensors


# Multi-head latent attention, as in DeepSeek: all heads' KV are one vector a token. vLLM's CPU kernels know
# only the real models' widths of that vector, 512 + 64.

_MLA_LAYERS: Final = 3
_MLA_LATENT: Final = 512
_MLA_ROPE: Final = 64
_MLA_NOPE: Final = 64
_MLA_VALUE: Final = 64
_MLA_GAIN: Final = 2.0
_MLA_MLP_GAIN: Final = 3.0


def _mla_config(vocab: int) -> Any:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        **_common(vocab, _MLA_LAYERS),
        num_key_value_heads=_HEADS,
        q_lora_rank=None,
        kv_lora_rank=_MLA_LATENT,
        qk_rope_head_dim=_MLA_ROPE,
        qk_nope_head_dim=_MLA_NOPE,
        v_head_dim=_MLA_VALUE,
        first_k_dense_replace=_MLA_LAYERS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        num_mtp_layers=0,
    )
    config.architectures = ["DeepseekV3ForCausalLM"]
    return config


def _mla_weights(vocab: int, seed: int) -> dict[str, Any]:
    matrix = _matrices(seed)
    tensors = {"model.embed_tokens.weight": matrix(vocab, _HIDDEN, gain=_HIDDEN**0.5)}
    for layer in range(_MLA_LAYERS):
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        queries, keys_and_values = _MLA_NOPE + _MLA_ROPE, _MLA_NOPE + _MLA_VALUE
        tensors[f"{attention}.q_proj.weight"] = matrix(_HEADS * queries, _HIDDEN, gain=_MLA_GAIN)
        tensors[f"{attention}.kv_a_proj_with_mqa.weight"] = matrix(_MLA_LATENT + _MLA_ROPE, _HIDDEN)
        tensors[f"{attention}.kv_a_layernorm.weight"] = _constant(_MLA_LATENT, 1)
        tensors[f"{attention}.kv_b_proj.weight"] = matrix(_HEADS * keys_and_values, _MLA_LATENT, gain=1.5)
        tensors[f"{attention}.o_proj.weight"] = matrix(_HIDDEN, _HEADS * _MLA_VALUE, gain=_MLA_GAIN)
        tensors |= _mlp(name, matrix, _MLA_MLP_GAIN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = _constant(_HIDDEN, 1)
    tensors["model.norm.weight"] = _constant(_HIDDEN, 1)
    tensors["lm_head.weight"] = matrix(vocab, _HIDDEN, gain=4.0)
    return tensors


# Sliding window and full attention mixed, as in Gemma 3: most layers see a window, every third one all.

_WINDOW_LAYERS: Final = 6
_WINDOW_PERIOD: Final = 3
_WINDOW_KV_HEADS: Final = 2
_WINDOW_HEAD_DIM: Final = 32
WINDOW_TOKENS: Final = 80
"""No multiple of a block, so that a window's first block is used in part."""
_WINDOW_GAIN: Final = 2.0
_WINDOW_MLP_GAIN: Final = 2.0


def _window_config(vocab: int) -> Any:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        **_common(vocab, _WINDOW_LAYERS),
        num_key_value_heads=_WINDOW_KV_HEADS,
        head_dim=_WINDOW_HEAD_DIM,
        query_pre_attn_scalar=_WINDOW_HEAD_DIM,
        sliding_window=WINDOW_TOKENS,
        layer_types=[
            "full_attention" if layer % _WINDOW_PERIOD == _WINDOW_PERIOD - 1 else "sliding_attention"
            for layer in range(_WINDOW_LAYERS)
        ],
    )
    config.architectures = ["Gemma3ForCausalLM"]
    config.tie_word_embeddings = True  # as vLLM reads these models
    return config


def _window_weights(vocab: int, seed: int) -> dict[str, Any]:
    """Weights of norms are what is added to one."""
    matrix = _matrices(seed)
    heads, kv = _HEADS * _WINDOW_HEAD_DIM, _WINDOW_KV_HEADS * _WINDOW_HEAD_DIM
    # The embedding is multiplied by the root of the width, and gives the logits too.
    tensors = {"model.embed_tokens.weight": matrix(vocab, _HIDDEN)}
    for layer in range(_WINDOW_LAYERS):
        name = f"model.layers.{layer}"
        tensors[f"{name}.self_attn.q_proj.weight"] = matrix(heads, _HIDDEN)
        tensors[f"{name}.self_attn.k_proj.weight"] = matrix(kv, _HIDDEN)
        tensors[f"{name}.self_attn.v_proj.weight"] = matrix(kv, _HIDDEN)
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(_HIDDEN, heads)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{name}.self_attn.{norm}.weight"] = _constant(_WINDOW_HEAD_DIM, _WINDOW_GAIN - 1)
        tensors |= _mlp(name, matrix, 1.0)
        for norm, gain in (
            ("input_layernorm", 1.0),
            ("post_attention_layernorm", _WINDOW_GAIN),
            ("pre_feedforward_layernorm", 1.0),
            ("post_feedforward_layernorm", _WINDOW_MLP_GAIN),
        ):
            tensors[f"{name}.{norm}.weight"] = _constant(_HIDDEN, gain - 1)
    tensors["model.norm.weight"] = _constant(_HIDDEN, 3)
    return tensors


FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        Family(
            name="tiny",
            description="grouped-query attention (Llama)",
            config=_gqa_config,
            weights=_gqa_weights,
        ),
        Family(
            name="tiny-mla",
            description="multi-head latent attention (DeepSeek)",
            config=_mla_config,
            weights=_mla_weights,
        ),
        Family(
            name="tiny-window",
            description="sliding windows and full attention (Gemma 3)",
            config=_window_config,
            weights=_window_weights,
        ),
    )
}
