"""Prefix caches with capacity: the radix tree of a whole workload, and least-recently-used caches over it.

Owns what is cached where. A workload is known in advance, so its radix tree is built once and shared by all
caches; a cache is then a map from segment to how far it is held, and a request touches a handful of
segments instead of a thousand blocks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import ceil

ROOT = -1


class PrefixTree:
    """All prompts of a workload as segments between fork points.

    A *path* is ``(segment, end_block)``: all blocks from the root down to ``end_block`` inside that
    segment. Rows extend earlier rows: ``add(parent_path, shared_blocks, blocks)`` returns a branch position
    which ``freeze`` turns into paths.
    """

    __slots__ = (
        "_branch_end",
        "_branch_parent",
        "_branch_start",
        "_forks",
        "_segments_of",
        "parent",
        "start",
    )

    def __init__(self) -> None:
        self._branch_parent: list[int] = []
        self._branch_start: list[int] = []
        self._branch_end: list[int] = []
        self._forks: dict[int, set[int]] = {}
        self._segments_of: list[tuple[list[int], list[int]]] = []
        self.parent: list[int] = []
        self.start: list[int] = []

    def add(self, branch: int, at_block: int, blocks: int) -> int:
        """The branch that holds a path of ``blocks`` which leaves ``branch`` after ``at_block`` (ROOT: a
        fresh one).
        """
        starts, parents = self._branch_start, self._branch_parent
        while branch != ROOT and starts[branch] >= at_block:
            branch = parents[branch]
        if blocks <= at_block:
            return branch
        if branch != ROOT:
            if self._branch_end[branch] == at_block:
                self._branch_end[branch] = blocks
                return branch
            self._forks.setdefault(branch, set()).add(at_block)
        parents.append(branch)
        starts.append(at_block)
        self._branch_end.append(blocks)
        return len(starts) - 1

    def freeze(self) -> None:
        """Cuts the branches at their forks into segments; no ``add`` after this."""
        parent, start = self.parent, self.start
        for branch, begin in enumerate(self._branch_start):
            cuts = [begin, *sorted(self._forks[branch])] if branch in self._forks else [begin]
            first = len(start)
            above = self._branch_parent[branch]
            parent.append(ROOT if above == ROOT else self.segment(above, begin))
            start.append(begin)
            for offset, cut in enumerate(cuts[1:]):
                parent.append(first + offset)
                start.append(cut)
            self._segments_of.append((cuts, list(range(first, first + len(cuts)))))

    def segment(self, branch: int, end_block: int) -> int:
        """The segment of a branch in which a path of ``end_block`` blocks ends."""
        if branch == ROOT or end_block <= 0:
            return ROOT
        while self._branch_start[branch] >= end_block:
            branch = self._branch_parent[branch]
            if branch == ROOT:
                return ROOT
        cuts, ids = self._segments_of[branch]
        index = len(cuts) - 1
        while cuts[index] >= end_block:
            index -= 1
        return ids[index]


class PrefixCache:
    """Blocks one engine (or pool) holds, least recently used and deepest evicted first.

    Since a path is always touched as a whole, no segment is more recent than the one above it: a held
    segment implies that everything above it is held, so a lookup climbs from the leaf and stops at the
    first segment it finds.
    """

    __slots__ = ("_held", "_parent", "_start", "capacity_blocks", "evicted_blocks", "used_blocks")

    def __init__(self, tree: PrefixTree, capacity_blocks: float) -> None:
        self._held: OrderedDict[int, int] = OrderedDict()
        self._parent: Sequence[int] = tree.parent
        self._start: Sequence[int] = tree.start
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.evicted_blocks = 0

    def hit_blocks(self, segment: int, end_block: int) -> int:
        """How many leading blocks of a path are held."""
        held, parent = self._held, self._parent
        while segment != ROOT:
            reach = held.get(segment)
            if reach is not None:
                return reach if reach < end_block else end_block
            segment = parent[segment]
        return 0

    def insert(self, segment: int, end_block: int) -> None:
        """The whole path is held and is the most recent; the oldest blocks leave if room is short."""
        held, parent, start = self._held, self._parent, self._start
        reach_of, renew = held.get, held.move_to_end
        used = self.used_blocks
        end = end_block
        while segment != ROOT:
            begin = start[segment]
            reach = reach_of(segment)
            if reach is None:
                held[segment] = end
                used += end - begin
            else:
                if reach < end:
                    held[segment] = end
                    used += end - reach
                renew(segment)
            segment = parent[segment]
            end = begin
        self.used_blocks = used
        if used > self.capacity_blocks:
            self._evict()

    def _evict(self) -> None:
        held, start = self._held, self._start
        excess = self.used_blocks - self.capacity_blocks
        total = 0
        while excess > 0 and held:
            segment = next(iter(held))
            reach = held[segment]
            gone = reach - start[segment]
            if gone <= excess:
                del held[segment]
            else:
                gone = ceil(excess)
                held[segment] = reach - gone
            excess -= gone
            total += gone
        self.used_blocks -= total
        self.evicted_blocks += total

    def check_invariants(self) -> None:
        """Raises AssertionError if the count is off or a held segment hangs in the air."""
        assert self.used_blocks == sum(reach - self._start[segment] for segment, reach in self._held.items())
        for segment in self._held:
            above = self._parent[segment]
            assert above == ROOT or self._held[above] >= self._start[segment]
