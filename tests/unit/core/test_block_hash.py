"""Block hashes rebuilt from token IDs equal vLLM's own."""

import hashlib
import pickle
from types import SimpleNamespace

import cbor2
import pytest

from pdd.core.block_hash import BlockHasher, HashAlgo

TOKENS = list(range(1000, 1103))


def hasher(algo: HashAlgo = "sha256_cbor", **changes: int) -> BlockHasher:
    """A hasher of small blocks."""
    return BlockHasher(algo=algo, seed="0", **{"block_tokens": 16, **changes})  # type: ignore[arg-type]


def test_a_chain_by_hand() -> None:
    root = hashlib.sha256(cbor2.dumps("0", canonical=True)).digest()
    first = hashlib.sha256(cbor2.dumps((root, tuple(TOKENS[:16]), None), canonical=True)).digest()
    second = hashlib.sha256(cbor2.dumps((first, tuple(TOKENS[16:32]), None), canonical=True)).digest()
    assert hasher().block_hashes(TOKENS[:47]) == [first, second]
    assert hasher().chunk_keys(TOKENS[:47]) == [first + bytes(4), second + bytes(4)]
    assert hasher(blocks_per_chunk=2, group_index=1).chunk_keys(TOKENS[:47]) == [second + b"\0\0\0\1"]


def test_the_default_algorithm_by_hand() -> None:
    root = hashlib.sha256(pickle.dumps("0", protocol=5)).digest()
    first = hashlib.sha256(pickle.dumps((root, tuple(TOKENS[:16]), None), protocol=5)).digest()
    assert hasher("sha256").block_hashes(TOKENS[:16]) == [first]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32])
def test_only_full_blocks_have_hashes(count: int) -> None:
    assert len(hasher().block_hashes(TOKENS[:count])) == count // 16


def test_a_salt_changes_every_block_and_an_adapter_too() -> None:
    plain = set(hasher().block_hashes(TOKENS))
    assert plain.isdisjoint(hasher().block_hashes(TOKENS, cache_salt="tenant"))
    assert plain.isdisjoint(hasher().block_hashes(TOKENS, lora=("name", "/path")))


def test_a_chain_can_be_extended_from_a_key() -> None:
    whole = hasher(blocks_per_chunk=2).chunk_keys(TOKENS, cache_salt="s")
    begun = hasher(blocks_per_chunk=2).chunk_keys(TOKENS[:32], cache_salt="s")
    assert begun + hasher(blocks_per_chunk=2).chunk_keys(TOKENS[32:], parent_key=begun[-1]) == whole


@pytest.mark.parametrize("algo", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("lora", [None, ("adapter", "/adapters/one")])
def test_equal_to_vllm(
    algo: HashAlgo, salt: str | None, lora: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_cache_utils = pytest.importorskip(
        "vllm.v1.core.kv_cache_utils", reason="vllm is not installed, so its hashes cannot be compared"
    )
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.kv_offload.base import make_offload_key

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    function = get_hash_fn_by_name(algo)
    kv_cache_utils.init_none_hash(function)
    request = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(TOKENS),
        all_token_ids=TOKENS,
        mm_features=[],
        cache_salt=salt,
        prompt_embeds=None,
        lora_request=SimpleNamespace(lora_name=lora[0], lora_path=lora[1]) if lora else None,
    )
    theirs = kv_cache_utils.get_request_block_hasher(16, function)(request)
    assert hasher(algo).block_hashes(TOKENS, cache_salt=salt, lora=lora) == theirs
    keys = [make_offload_key(block_hash, 0) for block_hash in theirs[1::2]]
    assert hasher(algo, blocks_per_chunk=2).chunk_keys(TOKENS, cache_salt=salt, lora=lora) == keys
