"""vLLM's content addresses of KV blocks and offloaded chunks, rebuilt from token IDs alone.

The router uses them to know which chunks of a prompt a far cache should already hold. They are a hint:
the offer between agents decides what is sent. Nothing here knows how the chunks are stored or moved.

Source:
    vllm/v1/core/kv_cache_utils.py@0.32.0 (``hash_block_tokens``, ``generate_block_hash_extra_keys``,
    ``init_none_hash``), vllm/utils/hashing.py@0.32.0, vllm/v1/kv_offload/base.py@0.32.0
    (``make_offload_key``).
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import cbor2

HashAlgo = Literal["sha256", "sha256_cbor"]
GROUP_INDEX_BYTES = 4
ExtraKeys = tuple[tuple[str, ...], ...]


def sha256(value: object) -> bytes:
    """SHA-256 over the value's pickle, vLLM's default; the same in every CPython."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def sha256_cbor(value: object) -> bytes:
    """SHA-256 over the value's canonical CBOR, the language-neutral form."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


_FUNCTIONS: dict[HashAlgo, Callable[[object], bytes]] = {"sha256": sha256, "sha256_cbor": sha256_cbor}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHasher:
    """Rebuilds block hashes and chunk keys of one fleet of engines.

    Args:
        algo: ``--prefix-caching-hash-algo`` of the engines.
        seed: ``PYTHONHASHSEED`` of the engines; the root of every chain.
        block_tokens: Tokens per block.
        blocks_per_chunk: Blocks per offloaded chunk.
        group_index: KV cache group the keys are made for.
    """

    algo: HashAlgo
    seed: str
    block_tokens: int
    blocks_per_chunk: int = 1
    group_index: int = 0

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self.block_tokens * self.blocks_per_chunk

    def block_hashes(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        lora: tuple[str, str] | None = None,
        parent: bytes | None = None,
    ) -> list[bytes]:
        """The hash of each full block, each over its whole prefix.

        Args:
            token_ids: Tokens of the prompt, from its first (or from the block after ``parent``).
            cache_salt: The tenant's salt; it enters block 0 and so the whole chain.
            lora: Name and path of the adapter; it enters every block.
            parent: Hash of the block before the first of ``token_ids``, to extend a known chain.
        """
        hash_function = _FUNCTIONS[self.algo]
        previous = hash_function(self.seed) if parent is None else parent
        every_block: ExtraKeys = (("lora", *lora),) if lora else ()
        hashes: list[bytes] = []
        for start in range(0, len(token_ids) - self.block_tokens + 1, self.block_tokens):
            salted = start == 0 and parent is None and bool(cache_salt)
            extra = (*every_block, ("cache_salt", cache_salt)) if salted else every_block
            block = tuple(token_ids[start : start + self.block_tokens])
            previous = hash_function((previous, block, extra or None))
            hashes.append(previous)
        return hashes

    def chunk_keys(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        lora: tuple[str, str] | None = None,
        parent_key: bytes | None = None,
    ) -> list[bytes]:
        """The key of each full chunk: the hash of its last block and the big-endian group index.

        Args:
            token_ids: Tokens of the prompt, from its first (or from the chunk after ``parent_key``).
            cache_salt: The tenant's salt.
            lora: Name and path of the adapter.
            parent_key: Key of the chunk before the first of ``token_ids``, to extend a known chain.
        """
        parent = None if parent_key is None else parent_key[:-GROUP_INDEX_BYTES]
        hashes = self.block_hashes(token_ids, cache_salt=cache_salt, lora=lora, parent=parent)
        suffix = self.group_index.to_bytes(GROUP_INDEX_BYTES, "big")
        return [
            block_hash + suffix for block_hash in hashes[self.blocks_per_chunk - 1 :: self.blocks_per_chunk]
        ]
