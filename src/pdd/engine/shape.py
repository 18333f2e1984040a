"""What the KV cache of an engine consists of, in words of PDD's own. Knows neither vLLM nor torch.

A *KV cache group* is a set of layers that keep the same tokens; a model of one kind of attention has one.
vLLM keys, stores and loads chunks group by group.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SHAPE_KEY: Final = "pdd_cache_shape"
"""Where the connector leaves the shape in vLLM's extra configuration for the spec and the tier."""


SAMPLER_KEY: Final = "pdd_sampler"
"""Where it leaves what the engine does with carried penalties and seeds."""


class Kind(StrEnum):
    """The kinds of KV cache PDD can move; others go by vLLM's name for them."""

    FULL = "full"
    """Keys and values of every token."""
    WINDOW = "window"
    """Keys and values of the last tokens."""
    LATENT = "latent"
    """One vector a token for all heads: multi-head latent attention, MLA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One KV cache group.

    ``kind`` is a ``Kind`` or vLLM's name for another one. ``window_tokens`` is what a window keeps, 0 for
    other kinds. ``is_draft`` says that its layers only guess tokens for speculative decoding.
    """

    kind: str
    block_tokens: int
    window_tokens: int = 0
    is_draft: bool = False

    def window_chunks(self, chunk_tokens: int) -> int | None:
        """Chunks of this group that a continuation at a chunk's end needs; None: all of them."""
        return -(-self.window_tokens // chunk_tokens) if self.kind == Kind.WINDOW else None

    def __str__(self) -> str:
        return f"{self.kind}({self.window_tokens})" if self.window_tokens else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """All groups, and how the workers of one engine share them.

    ``num_shards`` is how many different shares of a layer's KV the tensor-parallel workers hold: their number
    where each has heads of its own, fewer where they hold copies. ``keeps_all`` says whether every block of
    a window is kept for a while, not only those at some places. ``is_latent_model`` names models of latent
    attention, whatever is kept of them. ``is_on_cpu`` names the CPU backend, ``has_amx`` what it can use
    there.
    """

    groups: tuple[CacheGroup, ...]
    num_shards: int = 1
    keeps_all: bool = True
    is_latent_model: bool = False
    is_on_cpu: bool = False
    has_amx: bool = False

    def __str__(self) -> str:
        return "+".join(map(str, self.groups))
