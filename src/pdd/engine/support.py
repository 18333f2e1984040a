"""Refuses engines PDD cannot serve, with the reason and what to change. Needs no vLLM to run."""

import os
import re
from typing import TYPE_CHECKING, Final

from pdd.core.errors import ConfigurationError, UnsupportedModelError
from pdd.engine.shape import SHAPE_KEY, CacheShape, Kind

if TYPE_CHECKING:
    from pdd.engine.vllm_api import OffloadingConfig

HASH_ALGORITHMS: Final = ("sha256", "sha256_cbor")
TIER_NAME: Final = "PddTier"
SEED_VARIABLE: Final = "PYTHONHASHSEED"


def check_shape(shape: CacheShape, *, model: str, blocks_per_chunk: int) -> None:
    """PDD can move the KV of a model whose cache has this shape.

    Raises:
        UnsupportedModelError: Naming the property that stands against it, and what to do.
    """

    def refuse(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"model {model} (KV cache {shape}): {reason}")

    for group in shape.groups:
        if group.is_draft:
            raise refuse(
                "the layers of speculative decoding rewrite their last block: remove --speculative-config"
            )
        if group.kind not in list(Kind):
            raise refuse(
                f"a KV cache of kind {group.kind} cannot be moved; full attention, sliding windows and "
                "latent attention (MLA) can: serve another model"
            )
    is_latent = all(group.kind == Kind.LATENT for group in shape.groups)
    if shape.is_latent_model and shape.is_on_cpu and not (is_latent and shape.has_amx):
        raise refuse(
            "vLLM's CPU backend computes latent attention (MLA) of a prompt only from its first token, "
            "unless the processor has AMX, so that it cannot go on from KV that arrived (and without MLA it "
            "computes other values for a prompt than for a single token): serve it on GPUs, or another model"
        )
    if len({group.block_tokens for group in shape.groups}) > 1:
        sizes = ", ".join(f"{group}: {group.block_tokens}" for group in shape.groups)
        raise refuse(f"its groups have blocks of different size ({sizes} tokens): serve another model")
    has_windows = any(group.kind == Kind.WINDOW for group in shape.groups)
    if has_windows and not shape.keeps_all:
        raise refuse(
            "vLLM is told to keep sliding windows only at some places, so that chunks which have to cross "
            "are missing: use the command that pdd serve --print shows, without another retention interval"
        )
    if has_windows and blocks_per_chunk != 1:
        raise refuse(
            "vLLM stores only those blocks of a chunk that a sliding window still sees, and takes the chunk "
            f"for whole: set kv.blocks_per_chunk = 1 (it is {blocks_per_chunk}), raise kv.block_size_tokens"
        )


def check_supported(config: "OffloadingConfig") -> None:
    """PDD can serve an engine of this configuration.

    Raises:
        ConfigurationError: Naming what has to change, and why.
    """
    if SHAPE_KEY not in config.extra_config:
        raise ConfigurationError(
            "this engine was not started with PDD's connector: use the command that pdd serve --print shows"
        )
    parallel = config.parallel
    # vLLM resets the size to 1 for independent replicas, but leaves the replica's number in the engine id.
    if parallel.data_parallel_size > 1 or re.search(r"_dp\d+$", config.engine_id):
        raise ConfigurationError(
            "data parallelism inside an engine is not supported, since one agent serves one scheduler: "
            "start one engine per replica instead of --data-parallel-size"
        )
    if parallel.pp_size > 1:
        raise ConfigurationError(
            "pipeline parallelism is not supported, since a chunk has to hold all layers: "
            "remove --pipeline-parallel-size"
        )
    for tier in config.extra_config.get("secondary_tiers", ()):
        if isinstance(tier, dict) and tier.get("type") == TIER_NAME:
            check_hash(str(tier.get("hash_algo")), str(tier.get("hash_seed")), os.environ.get(SEED_VARIABLE))


def check_hash(algorithm: str, seed: str, environment_seed: str | None) -> None:
    """All engines that use this algorithm and seed give equal blocks equal names.

    Raises:
        ConfigurationError: If they would not.
    """
    if algorithm not in HASH_ALGORITHMS:
        raise ConfigurationError(
            f"hash algorithm {algorithm!r} is seeded in each process, so no two engines would agree on a "
            f"block's name: use one of {', '.join(HASH_ALGORITHMS)}"
        )
    if environment_seed != seed:
        raise ConfigurationError(
            f"{SEED_VARIABLE} is {environment_seed!r}, but kv.hash_seed is {seed!r}: they have to be equal, "
            "since the seed is part of every block's name"
        )
