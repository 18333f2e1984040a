"""What must be equal on two engines before KV bytes of one may be read by the other.

Equal chunk size does not mean equal layout: an engine with another tensor-parallel degree, block layout
or CPU instruction set can have chunks of the same length and other meaning. So each engine states all
that gives its bytes their meaning, and peers compare the statements when they meet.
"""

from collections.abc import Mapping

FORMAT_VERSION = 1
"""Raised whenever the meaning of a chunk's bytes changes on our side."""

FIELDS = (
    "format_version",
    "model",
    "dtype",
    "kv_layout",
    "kv_groups",
    "block_tokens",
    "chunk_tokens",
    "chunk_bytes",
    "hash",
    "parallelism",
    "platform",
)
"""The fields every fingerprint has:

- ``model``: digest over configuration and weights, not the name.
- ``dtype``: of the KV cache.
- ``kv_layout``: vLLM's layout name of one block.
- ``kv_groups``: the kinds of KV cache, e.g. ``full``, ``latent`` or ``window(512)+full``.
- ``block_tokens``, ``chunk_tokens``, ``chunk_bytes``: as decimal text.
- ``hash``: algorithm and seed of the block hashes, e.g. ``sha256_cbor/0``.
- ``parallelism``: e.g. ``tp=2 pcp=1 dcp=1``, or ``canonical v1`` where chunks do not depend on it.
- ``platform``: device type and, on the CPU, its instruction set, e.g. ``cpu/AVX2``.
"""

Fingerprint = Mapping[str, str]


def differing_fields(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, ...]:
    """The fields in which two fingerprints differ, each as ``name: ours != theirs``; empty if compatible."""
    return tuple(
        f"{name}: {ours.get(name, 'absent')} != {theirs.get(name, 'absent')}"
        for name in FIELDS
        if ours.get(name) != theirs.get(name)
    )
