"""A pool of prefill engines: queues, chunked batches, prefix caches, placement.

Owns what happens between a request's arrival and its first token. Engines serve their queues in order and
pack short uncached tails into one chunk, as chunked prefill does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from pdd.policy.affinity import CacheCandidate, place_near_cache
from pdd.sim.cache import PrefixCache
from pdd.sim.chunk_timer import ChunkTimer
from pdd.sim.decode_engine import DecodeEngine
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
        self._by_until = [(0.0, engine) for engine in range(count)]  # a heap; entries may be out of date
        self._home: dict[int, int] = {}
        self._decoders: Sequence[DecodeEngine] = ()
        self._host_of: list[int] = []
        self._time = ChunkTimer(model)
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

    def last_chunk_tokens(self, request: int) -> int:
        """What of a prompt the last of its chunks computed, at most."""
        miss, chunk = self.miss_tokens[request], self._chunk_tokens
        return miss if miss < chunk else chunk

    def share_with(self, decoders: Sequence[DecodeEngine]) -> Sequence[int]:
        """Each engine also decodes, one step a chunk, what its decoder holds.

        A chunk takes longer by the reads of that batch's contexts, and the batch waits for the chunk.

        Returns:
            By request, the engine that prefilled it, once it has begun.
        """
        self._decoders = decoders
        self._host_of = [0] * len(self._inputs)
        return self._host_of

    def submit(self, request: int) -> None:
        """Places and queues the request."""
        until, order = self._until_s, self._by_until
        until_s, engine = order[0]
        while until[engine] != until_s:
            heappop(order)
            until_s, engine = order[0]
        miss = self._miss(request, engine)
        if not self._pooled:
            home = self._home.get(self._parents[request], engine)
            if home != engine:
                engine, miss = self._choose(request, home, engine, miss)
            self._home[request] = engine
        self.miss_tokens[request] = miss
        if self._busy[engine]:
            self._queues[engine].append(request)
            now = self._kernel.now_s
            begin = until[engine]
            ends_s = begin if begin > now else now
            ends_s += self._time.rough_s(miss, self._inputs[request] - miss)
            until[engine] = ends_s
            heappush(order, (ends_s, engine))
        else:
            self._begin(engine, request)

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

    def _begin(self, engine: int, head: int) -> None:
        """The engine works on a request and on what of its queue fits the last chunk."""
        now, chunk, queue = self._kernel.now_s, self._chunk_tokens, self._queues[engine]
        miss = self.miss_tokens[head]
        cached = self._inputs[head] - miss
        self.started_s[head] = now
        slower_s = self._decoders[engine].batch_s if self._decoders else 0.0
        spent, done, chunks = 0.0, 0, 1
        while miss - done > chunk:
            spent += self._time.alone_s(chunk, cached + done) + slower_s
            done += chunk
            chunks += 1
            if done == chunk:
                self._kernel.at(now + spent, COMPLETION, self._on_sendable, head)
        tail = miss - done
        if queue:
            batch, parts = self._pack(engine, head, tail, cached + done)
            spent += self._time.batch_s(parts) if len(parts) > 1 else self._time.alone_s(*parts[0])
        else:
            batch = [head]
            spent += self._time.alone_s(tail, cached + done)
        spent += slower_s
        self._busy[engine] = True
        ends_s = now + spent
        if not queue:
            self._until_s[engine] = ends_s
            heappush(self._by_until, (ends_s, engine))
        if self._decoders:
            self._decoders[engine].slow_to(spent / chunks)
            for request in batch:
                self._host_of[request] = engine
        self.busy_s += spent
        self._kernel.at(ends_s, COMPLETION, self._finish, (engine, batch, done > 0))

    def _pack(
        self, engine: int, head: int, tail: int, cached: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The requests of the last chunk, and of each its new and its cached tokens."""
        queue, misses, inputs = self._queues[engine], self.miss_tokens, self._inputs
        batch, parts = [head], [(tail, cached)]
        room = self._chunk_tokens - tail
        while queue and misses[queue[0]] <= room:
            request = queue.popleft()
            miss = misses[request] = min(misses[request], self._miss(request, engine))
            self.started_s[request] = self._kernel.now_s
            batch.append(request)
            parts.append((miss, inputs[request] - miss))
            room -= miss
        return batch, parts

    def _finish(self, ended: tuple[int, list[int], bool]) -> None:
        engine, batch, head_was_sendable = ended
        insert, misses = self._caches[engine].insert, self.miss_tokens
        for request in batch:
            insert(self._segments[request], self._blocks[request])
            self.computed_tokens += misses[request]
        queue = self._queues[engine]
        if queue:
            head = queue.popleft()
            # Looked up again: its predecessor may have been computed meanwhile.
            misses[head] = self._miss(head, engine)
            self._begin(engine, head)
        else:
            self._busy[engine] = False
            if self._decoders:
                self._decoders[engine].slow_to(0.0)
        sendable, done = self._on_sendable, self._on_done
        for request in batch:
            if not head_was_sendable:
                sendable(request)
            head_was_sendable = False
            done(request)
