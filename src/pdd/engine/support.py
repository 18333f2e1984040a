"""Refuses engines PDD cannot serve, with the reason and what to change. Needs no vLLM to run."""

import os
import re
from typing import TYPE_CHECKING, Final

from pdd.core.errors import ConfigurationError

if TYPE_CHECKING:
    from pdd.engine.vllm_api import OffloadingConfig

HASH_ALGORITHMS: Final = ("sha256", "sha256_cbor")
TIER_NAME: Final = "PddTier"
SEED_VARIABLE: Final = "PYTHONHASHSEED"


def check_supported(config: "OffloadingConfig") -> None:
    """PDD can serve an engine of this configuration.

    Raises:
        ConfigurationError: Naming what has to change, and why.
    """
    if len(config.groups) != 1:
        raise ConfigurationError(
            f"model {config.model.name} has {len(config.groups)} KV cache groups (kinds of attention); "
            "PDD moves models with one group only"
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
