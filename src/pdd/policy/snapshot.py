"""What a decision may look at: frozen views of links, engines and caches at one moment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """One path for KV from a prefill engine to another engine, as the sending agent measures it."""

    rate_bytes_per_s: float
    rtt_s: float
    queued_bytes: int = 0
    up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine as the router sees it.

    Args:
        id: The engine's id.
        healthy: It answers its health check.
        running: Requests the router has open on it or is about to: planned, or until their KV has landed.
        capacity: Requests it runs at once.
        kv_ready: The agent beside it is connected, so KV can reach or leave it.
        max_model_len: Prompt and answer together, in tokens; None if not yet known.
        tripped: It failed too often lately; asked only when no other is left.
        kv_usage_ratio: How much of its KV cache running requests hold, as the engine says; 0 if it does not.
        pending_tokens: Prompt tokens of open requests that it has yet to compute, as the router predicts
            them.
        held_tokens: Tokens of the prompt in question that its caches are believed to hold.
        itl_s: Seconds from one token of a request to its next, as the router saw them lately; None if never.
    """

    id: str
    healthy: bool
    running: int
    capacity: int
    kv_ready: bool = True
    max_model_len: int | None = None
    itl_s: float | None = None
    tripped: bool = False
    kv_usage_ratio: float = 0.0
    pending_tokens: int = 0
    held_tokens: int = 0

    @property
    def load_ratio(self) -> float:
        """The larger of open requests over capacity (above 1 when they queue) and KV cache in use."""
        return max(self.running / self.capacity, self.kv_usage_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaView:
    """What is believed to be missing in a main decode engine's cache for one prompt."""

    missing_chunks: int
    chunk_bytes: int

    @property
    def missing_bytes(self) -> int:
        """Bytes that have to cross the WAN."""
        return self.missing_chunks * self.chunk_bytes
