"""Engine time from a chip's data sheet, the model's shape and stated efficiencies.

Owns the roofline of prefill and decode. Every efficiency is an input and is reported with each prediction;
this module holds no constant that was fitted to anything.
"""

from dataclasses import dataclass
from math import ceil, inf

from pdd.core.errors import ConfigurationError
from pdd.sim.chips import Chip
from pdd.sim.kv_bytes import KvFootprint
from pdd.sim.model import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How much of each peak an engine reaches.

    Args:
        linear_ratio: Of the matrix peak, in the weight multiplications of prefill.
        attention_ratio: Of the bf16 peak, in prefill attention.
        bandwidth_ratio: Of the memory bandwidth, reading weights and KV in decode.
        link_ratio: Of the chip-to-chip link, in the collectives of tensor or expert parallelism.
        memory_ratio: Of the device memory that weights and KV may fill.
        step_overhead_s: Launch and scheduling time of a decode step.
        chunk_overhead_s: Launch and scheduling time of a prefill chunk.
        tile_tokens: Rows of a matrix tile: a chunk pays whole tiles.
    """

    linear_ratio: float
    attention_ratio: float
    bandwidth_ratio: float
    link_ratio: float
    memory_ratio: float
    step_overhead_s: float
    chunk_overhead_s: float
    tile_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How the weights are stored and multiplied.

    Args:
        bytes_per_param: 1 for fp8, 2 for bf16.
        fp8_compute: Whether matrix products run at the fp8 peak.
    """

    bytes_per_param: float
    fp8_compute: bool


class Roofline:
    """Times of one engine: one model replica on ``chips`` equal chips in tensor or expert parallel.

    Source:
        Williams et al., "Roofline", CACM 2009: time is the larger of work / peak and bytes / bandwidth.
        Collectives of tensor parallelism: two all-reduces a layer, ring cost 2 (n - 1) / n. Chunk floor and
        tiles: Sarathi-Serve (arXiv 2403.02310), section 4.3.
    """

    def __init__(
        self,
        *,
        shape: ModelShape,
        kv: KvFootprint,
        weights: Weights,
        chip: Chip,
        chips: int,
        efficiency: Efficiency,
    ) -> None:
        self.shape, self.kv, self.weights, self.chip, self.chips, self.efficiency = (
            shape,
            kv,
            weights,
            chip,
            chips,
            efficiency,
        )
        if chips > 1 and not chip.link_bytes_per_s:
            raise ConfigurationError(
                f"chip {chip.name} states no link rate, so an engine of {chips} of them has no prediction"
            )
        peak = chip.fp8_flops_per_s if weights.fp8_compute else chip.bf16_flops_per_s
        self._linear_flops_per_s = chips * peak * efficiency.linear_ratio
        self._attention_flops_per_s = chips * chip.bf16_flops_per_s * efficiency.attention_ratio
        self._bytes_per_s = chips * chip.hbm_bytes_per_s * efficiency.bandwidth_ratio
        self._fixed_read_bytes = (shape.total_params - shape.expert_params) * weights.bytes_per_param
        self._expert_bytes = shape.expert_params * weights.bytes_per_param

    @property
    def kv_capacity_bytes(self) -> float:
        """Device memory left for KV once the weights are loaded; negative if the model does not fit."""
        memory = self.chips * self.chip.hbm_bytes * self.efficiency.memory_ratio
        return memory - self.shape.total_params * self.weights.bytes_per_param

    def weight_read_s(self, tokens: float) -> float:
        """Time to read the weights that a step over so many tokens touches."""
        touched = self._fixed_read_bytes + self._expert_bytes * self.shape.touched_expert_ratio(tokens)
        return touched / self._bytes_per_s

    def chunk_s(self, query_tokens: int, cached_tokens: float) -> float:
        """One prefill chunk of ``query_tokens`` after ``cached_tokens`` of prefix."""
        tile = self.efficiency.tile_tokens
        tiled = ceil(query_tokens / tile) * tile
        compute = 2 * self.shape.active_params * tiled / self._linear_flops_per_s
        compute += self.shape.attention_flops(query_tokens, cached_tokens) / self._attention_flops_per_s
        memory = (
            self.weight_read_s(query_tokens) + cached_tokens * self.kv.bytes_per_token / self._bytes_per_s
        )
        return max(compute, memory) + self.collective_s(query_tokens) + self.efficiency.chunk_overhead_s

    def prefill_s(self, query_tokens: int, cached_tokens: float, *, chunk_tokens: int) -> float:
        """A whole prompt's uncached part, cut into chunks; the tail chunk pays its own floor."""
        total, done = 0.0, 0
        while done < query_tokens:
            step = min(chunk_tokens, query_tokens - done)
            total += self.chunk_s(step, cached_tokens + done)
            done += step
        return total

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        """One decode step of ``batch`` requests whose contexts sum to ``context_tokens``."""
        base, per_context = self.decode_terms(batch)
        return base + per_context * context_tokens

    def decode_terms(self, batch: float) -> tuple[float, float]:
        """``(base_s, s_per_context_token)`` of a decode step: what reading weights costs, and each cached
        token.

        Weights and attention each take the larger of reading and multiplying; MLA with many heads multiplies.
        What an indexer selects is a fixed read per request (contexts are taken to be longer than that).
        """
        multiply = 2 * self.shape.active_params * batch / self._linear_flops_per_s
        base = (
            max(self.weight_read_s(batch), multiply)
            + self.collective_s(batch)
            + self.efficiency.step_overhead_s
        )
        kv, rate = self.kv, self._attention_flops_per_s
        growing = sum(group.decode_flops(1.0) for group in self.shape.attention if group.max_visible is None)
        per_context = max(
            (kv.bytes_per_token - kv.selected_bytes_per_token) / self._bytes_per_s, growing / rate
        )
        if kv.selected_tokens:
            selected = sum(
                group.decode_flops(float(kv.selected_tokens))
                for group in self.shape.attention
                if group.max_visible is not None
            )
            read_s = kv.selected_bytes_per_token * kv.selected_tokens / self._bytes_per_s
            base += batch * max(read_s, selected / rate)
        return base, per_context

    def max_batch(self, context_tokens: float) -> int:
        """Requests of that context whose KV fits the device memory."""
        return max(0, int(self.kv_capacity_bytes / self.kv.request_bytes(context_tokens)))

    def batch_within(self, context_tokens: float, tpot_s: float) -> float:
        """Largest batch of equal contexts whose step stays within ``tpot_s`` and whose KV fits; 0 if none
        does.
        """
        best = 0
        for batch in range(1, self.max_batch(context_tokens) + 1):
            if self.decode_step_s(batch, batch * context_tokens) > tpot_s:
                break
            best = batch
        return best

    def collective_s(self, tokens: float) -> float:
        """All-reduces of one step over so many tokens."""
        if self.chips == 1:
            return 0.0
        activation_bytes = tokens * self.shape.hidden_size * 2
        ring = 2 * (self.chips - 1) / self.chips
        rate = self.chip.link_bytes_per_s * self.efficiency.link_ratio
        return 2 * self.shape.layers * ring * activation_bytes / rate if rate else inf
