"""Chunk times of one prefill engine, fast enough to be asked for every request."""

from pdd.sim.fleet import RoleModel


class ChunkTimer:
    """The roofline's (or the measured curve's) chunk times, constants worked out once."""

    def __init__(self, model: RoleModel) -> None:
        roofline, efficiency = model.roofline, model.roofline.efficiency
        self._measured = model.chunk_s if model.section.prefill_curve else None
        self._roofline = roofline
        chips = roofline.chips
        peak = (
            roofline.chip.fp8_flops_per_s if roofline.weights.fp8_compute else roofline.chip.bf16_flops_per_s
        )
        self._tile = efficiency.tile_tokens
        self._linear_s = 2 * roofline.shape.active_params / (chips * peak * efficiency.linear_ratio)
        self._attention_rate = chips * roofline.chip.bf16_flops_per_s * efficiency.attention_ratio
        groups = roofline.shape.attention
        self._pair_s = (
            sum(group.layers * group.flops_per_pair / group.stride for group in groups) / self._attention_rate
            if all(group.max_visible is None for group in groups)
            else None
        )
        self._expand_s = sum(group.layers * group.flops_per_cached for group in groups) / self._attention_rate
        self._kv_s = roofline.kv.bytes_per_token / (
            chips * roofline.chip.hbm_bytes_per_s * efficiency.bandwidth_ratio
        )
        self._overhead_s = efficiency.chunk_overhead_s
        self._is_parallel = chips > 1
        self._dense_read_s = 0.0 if roofline.shape.experts else roofline.weight_read_s(1)

    def alone_s(self, query: int, cached: int) -> float:
        """One prompt's tail alone, cut into chunks only if measured curves say so."""
        pair_s = self._pair_s
        if self._measured is not None or pair_s is None or self._is_parallel:
            return self.batch_s([(query, cached)])
        # As ``batch_s`` for one part, which most batches are.
        attention = pair_s * query * (cached + 0.5 * query) + self._expand_s * cached
        compute = self._linear_s * -(-query // self._tile) * self._tile + attention
        memory = (self._dense_read_s or self._roofline.weight_read_s(query)) + cached * self._kv_s
        return (compute if compute > memory else memory) + self._overhead_s

    def rough_s(self, query: int, cached: int) -> float:
        """As ``alone_s`` without floors and tiles: what a queue's length is estimated from."""
        if self._measured is not None or self._pair_s is None:
            return self.alone_s(query, cached)
        attention_s = query * self._pair_s * (cached + 0.5 * query) + self._expand_s * cached
        return self._overhead_s + query * self._linear_s + attention_s

    def batch_s(self, parts: list[tuple[int, int]]) -> float:
        """One chunk of several prompts' tails."""
        if self._measured is not None:
            return sum(self._measured(query, cached) for query, cached in parts)
        total, attention, prefix = 0, 0.0, 0
        pair_s = self._pair_s
        for query, cached in parts:
            total += query
            prefix += cached
            if pair_s is not None:
                attention += pair_s * query * (cached + 0.5 * query) + self._expand_s * cached
            else:
                attention += self._roofline.shape.attention_flops(query, cached) / self._attention_rate
        compute = self._linear_s * -(-total // self._tile) * self._tile + attention
        memory = (self._dense_read_s or self._roofline.weight_read_s(total)) + prefix * self._kv_s
        collective = self._roofline.collective_s(total) if self._is_parallel else 0.0
        return (compute if compute > memory else memory) + collective + self._overhead_s
