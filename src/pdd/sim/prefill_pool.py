"""A pool of prefill engines: queues, chunked batches, prefix caches, placement.

Owns what happens between a request's arrival and its first token. Engines serve their queues in order and
pack short uncached tails into one chunk, as chunked prefill does.
"""

from collections import deque
from collections.abc import Callable

from pdd.policy.affinity import CacheCandidate, place_near_cache
from pdd.sim.cache import PrefixCache
from pdd.sim.fleet import RoleModel
from pdd.sim.kernel import COMPLETION, Kernel
from pdd.sim.workload.stream import Paths, Workload


class PrefillPool:
    """Equal engines of one site.

    ``on_sendable(request)`` runs when the first chunk's KV exists, ``on_done(request)`` when the first
    token does.
    """

    def __init__(
        self,
        kernel: Kernel,
        model: RoleModel,
        workload: Workload,
        paths: Paths,
        *,
        pooled_cache: bool,
        on_sendable: Callable[[int], None],
        on_done: Callable[[int], None],
    ) -> None:
        count = model.section.engines
        self._kernel, self._model, self._on_sendable, self._on_done = kernel, model, on_sendable, on_done
        self._inputs, self._parents, self._size = (
            workload.input_tokens,
            workload.parent,
            workload.block_tokens,
        )
        self._segments, self._blocks = paths.prompt_segment, paths.prompt_blocks
        self._chunk_tokens = model.section.chunk_tokens
        blocks = model.section.cache / (model.roofline.kv.bytes_per_token * workload.block_tokens)
        if pooled_cache:
            self._caches = [PrefixCache(paths.tree, blocks * count)] * count
        else:
            self._caches = [PrefixCache(paths.tree, blocks) for _ in range(count)]
        self._pooled = pooled_cache
        self._queues: list[deque[int]] = [deque() for _ in range(count)]
        self._busy = [False] * count
        self._until_s = [0.0] * count
        self._home: dict[int, int] = {}
        self._queued_s: dict[int, float] = {}
        self._time = _ChunkTimer(model)
        self.miss_tokens: list[int] = [0] * len(workload)
        self.started_s: list[float] = [0.0] * len(workload)
        self.busy_s = 0.0
        self.computed_tokens = 0

    @property
    def num_engines(self) -> int:
        """Engines of the pool."""
        return len(self._queues)

    @property
    def num_waiting(self) -> int:
        """Requests queued and not started."""
        return sum(map(len, self._queues))

    def uncached_tokens(self, request: int) -> int:
        """Of a prompt, what the pool (or the likeliest engine) would compute; at least its last token."""
        engine = self._home.get(self._parents[request], 0)
        return self._miss(request, engine)

    def warm(self, request: int, segment: int, blocks: int) -> None:
        """Part of a prompt is cached from before the run, on one engine (or in the pool)."""
        self._caches[request % len(self._caches)].insert(segment, blocks)

    def submit(self, request: int) -> None:
        """Places and queues the request."""
        until = self._until_s
        engine = until.index(min(until))
        miss = self._miss(request, engine)
        if not self._pooled:
            home = self._home.get(self._parents[request], engine)
            if home != engine:
                engine, miss = self._choose(request, home, engine, miss)
            self._home[request] = engine
        self.miss_tokens[request] = miss
        now = self._kernel.now_s
        begin = until[engine]
        self._queues[engine].append(request)
        if self._busy[engine]:
            self._queued_s[request] = now
            cached = self._inputs[request] - miss
            until[engine] = (begin if begin > now else now) + self._time.rough_s(miss, cached)
        else:
            self._begin(engine)

    def _choose(self, request: int, home: int, least: int, least_miss: int) -> tuple[int, int]:
        now, tokens = self._kernel.now_s, self._inputs[request]
        home_miss = self._miss(request, home)
        misses = {home: home_miss, least: least_miss}
        chosen = place_near_cache(
            CacheCandidate(
                id=engine,
                wait_s=max(0.0, self._until_s[engine] - now),
                work_s=self._time.alone_s(miss, tokens - miss),
            )
            for engine, miss in misses.items()
        )
        return chosen.id, misses[chosen.id]

    def _miss(self, request: int, engine: int) -> int:
        hit = self._caches[engine].hit_blocks(self._segments[request], self._blocks[request]) * self._size
        miss = self._inputs[request] - hit
        return miss if miss > 1 else 1

    def _begin(self, engine: int) -> None:
        queue, misses, inputs = self._queues[engine], self.miss_tokens, self._inputs
        now = self._kernel.now_s
        head = queue.popleft()
        miss = misses[head]
        if queue or self._queued_s.pop(head, now) != now:
            # Looked up again: its predecessor may have been computed meanwhile.
            miss = misses[head] = self._miss(head, engine)
        cached = inputs[head] - miss
        chunk = self._chunk_tokens
        spent, done = 0.0, 0
        while miss - done > chunk:
            spent += self._time.alone_s(chunk, cached + done)
            done += chunk
            if done == chunk:
                self._kernel.at(now + spent, COMPLETION, self._on_sendable, head)
        batch = [head]
        self.started_s[head] = now
        parts = [(miss - done, cached + done)]
        room = chunk - (miss - done)
        while queue and misses[queue[0]] <= room:
            request = queue.popleft()
            self._queued_s.pop(request, None)
            tail = misses[request] = min(misses[request], self._miss(request, engine))
            self.started_s[request] = now
            batch.append(request)
            parts.append((tail, inputs[request] - tail))
            room -= tail
        spent += self._time.batch_s(parts) if len(parts) > 1 else self._time.alone_s(*parts[0])
        self._busy[engine] = True
        if not queue:
            self._until_s[engine] = now + spent
        self.busy_s += spent
        self._kernel.at(now + spent, COMPLETION, self._finish, (engine, batch, done > 0))

    def _finish(self, ended: tuple[int, list[int], bool]) -> None:
        engine, batch, head_was_sendable = ended
        cache = self._caches[engine]
        for request in batch:
            cache.insert(self._segments[request], self._blocks[request])
            self.computed_tokens += self.miss_tokens[request]
        if self._queues[engine]:
            self._begin(engine)
        else:
            self._busy[engine] = False
        sendable, done = self._on_sendable, self._on_done
        for request in batch:
            if not head_was_sendable:
                sendable(request)
            head_was_sendable = False
            done(request)


class _ChunkTimer:
    """Chunk times of one engine, with the roofline's constants worked out once."""

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
