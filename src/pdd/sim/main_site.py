"""Site B of a run: MD's engines, the cache beside each, and which of them has which request."""

from collections.abc import Callable

from pdd.sim.cache import PrefixCache
from pdd.sim.decode_engine import DecodeEngine, StartHook
from pdd.sim.fleet import RoleModel
from pdd.sim.kernel import Kernel
from pdd.sim.workload.stream import Paths, Workload


class MainSite:
    """Equal MDs.

    ``of[request]`` is the engine a request was given to; ``least`` the engine with the fewest tokens
    promised, lowest index first.
    """

    __slots__ = (
        "_full_blocks",
        "_full_segment",
        "_has_drc",
        "_inputs",
        "_load",
        "_outputs",
        "_prompt_blocks",
        "_prompt_segment",
        "_size",
        "caches",
        "capacity_tokens",
        "engines",
        "least",
        "of",
    )

    def __init__(
        self,
        kernel: Kernel,
        model: RoleModel,
        workload: Workload,
        paths: Paths,
        *,
        has_drc: bool,
        on_start: StartHook,
        on_done: Callable[[int], None],
    ) -> None:
        count = model.section.engines
        self.capacity_tokens = model.decode.capacity_tokens
        self.engines = [
            DecodeEngine(kernel, model.decode, on_start=on_start, on_done=on_done) for _ in range(count)
        ]
        blocks = model.section.cache / (model.roofline.kv.bytes_per_token * workload.block_tokens)
        self.caches = [PrefixCache(paths.tree, blocks) for _ in range(count)]
        self.of = [0] * len(workload)
        self.least = 0
        self._load = [0] * count
        self._has_drc = has_drc
        self._size = workload.block_tokens
        self._inputs, self._outputs = workload.input_tokens, workload.output_tokens
        self._prompt_segment, self._prompt_blocks = paths.prompt_segment, paths.prompt_blocks
        self._full_segment, self._full_blocks = paths.full_segment, paths.full_blocks

    def hit_tokens(self, request: int, engine: int) -> int:
        """Tokens of the prompt that the engine's cache holds; at least the last one is always missing."""
        if not self._has_drc:
            return 0
        hit = self.caches[engine].hit_blocks(self._prompt_segment[request], self._prompt_blocks[request])
        hit *= self._size
        tokens = self._inputs[request]
        return hit if hit < tokens else tokens - 1

    def wait_s(self, request: int, engine: int) -> float:
        """A rough wait for a place: those queued ahead, at the pace at which places become free."""
        main, output = self.engines[engine], self._outputs[request]
        if main.has_room(self._inputs[request], output) or not main.num_running:
            return 0.0
        return (len(main.waiting) + 1) * output * main.step_s / main.num_running

    def take(self, request: int, engine: int) -> None:
        """The request belongs to the engine."""
        load = self._load
        self.of[request] = engine
        load[engine] += self._inputs[request] + self._outputs[request]
        if engine == self.least:
            self.least = load.index(min(load))

    def give_back(self, request: int) -> None:
        """The request has ended."""
        load, least, engine = self._load, self.least, self.of[request]
        left = load[engine] = load[engine] - self._inputs[request] - self._outputs[request]
        if left <= load[least] and (left < load[least] or engine < least):
            self.least = engine

    def keep(self, request: int) -> None:
        """The engine's cache holds the prompt and, from here on, its answer."""
        if self._has_drc:
            self.caches[self.of[request]].insert(self._full_segment[request], self._full_blocks[request])

    def join(self, request: int) -> None:
        """The engine decodes the request as soon as it has room."""
        self.engines[self.of[request]].join(request, self._inputs[request], self._outputs[request] - 1)
