"""Says what this engine's KV bytes mean, so that engines whose bytes mean something else never share them.

The model is identified by content, not by name: two folders of one name may hold different weights, and two
names the same ones. Reading all weights would take minutes, so the digest covers the configuration, every
safetensors header, every size, and samples of the bytes. Knows neither vLLM nor torch.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pdd.core.fingerprint import FORMAT_VERSION

NUM_SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
"""64 samples of 4 KiB a file: a retrained, merged or requantised checkpoint differs in nearly every byte."""

MAX_HEADER_BYTES: Final = 64 * 2**20
WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
IGNORED_CONFIG_KEYS: Final = ("_name_or_path", "_model_name_or_path", "transformers_version")


def model_folder(name: str) -> Path | None:
    """The folder of a model that is on this machine: itself, or the local snapshot of a Hugging Face name."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        # The library's "not cached" and "not a valid name" errors derive from these.
        return None


def model_digest(name: str) -> str:
    """A short digest of the model's content; of its name where the content is not found here.

    Args:
        name: Folder or Hugging Face name, as vLLM was given it.
    """
    folder = model_folder(name)
    digest = hashlib.sha256()
    if folder is None:
        digest.update(name.encode())
        return f"name:{digest.hexdigest()[:16]}"
    config = folder / "config.json"
    if config.is_file():
        digest.update(_canonical_config(config.read_bytes()))
    for file in sorted(file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)):
        digest.update(file.name.encode())
        _add_weights(digest, file)
    return digest.hexdigest()[:16]


def _canonical_config(data: bytes) -> bytes:
    """The configuration without what only says where and with what it was written."""
    try:
        values = json.loads(data)
    except ValueError:
        return data
    if not isinstance(values, dict):
        return data
    kept = {key: value for key, value in values.items() if key not in IGNORED_CONFIG_KEYS}
    return json.dumps(kept, sort_keys=True).encode()


def _add_weights(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    digest.update(struct.pack("<Q", size))
    with file.open("rb") as stream:
        if file.suffix == ".safetensors":
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(length, MAX_HEADER_BYTES)))
        last = max(0, size - SAMPLE_BYTES)
        for i in range(NUM_SAMPLES):
            stream.seek(last * i // (NUM_SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))


def make_fingerprint(
    *,
    model: str,
    dtype: str,
    kv_layout: str,
    kv_groups: str,
    block_tokens: int,
    chunk_tokens: int,
    chunk_bytes: int,
    hash_name: str,
    parallelism: str,
    platform: str,
) -> Mapping[str, str]:
    """The fingerprint with exactly the fields peers compare; see ``pdd.core.fingerprint``.

    Args:
        model: Digest of the model.
        dtype: Of the KV cache.
        kv_layout: vLLM's name for the order of dimensions in a block.
        kv_groups: Kinds of KV cache the model has, in vLLM's order.
        block_tokens: Tokens in vLLM's block.
        chunk_tokens: Tokens in what is stored and sent.
        chunk_bytes: Payload bytes of that.
        hash_name: Algorithm and seed of block hashes.
        parallelism: How the engine's workers share a chunk.
        platform: Device, and on CPUs the instruction set that decides the order inside a block.
    """
    return {
        "format_version": str(FORMAT_VERSION),
        "model": model,
        "dtype": dtype,
        "kv_layout": kv_layout,
        "kv_groups": kv_groups,
        "block_tokens": str(block_tokens),
        "chunk_tokens": str(chunk_tokens),
        "chunk_bytes": str(chunk_bytes),
        "hash": hash_name,
        "parallelism": parallelism,
        "platform": platform,
    }
