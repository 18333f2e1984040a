"""Prefix caches with capacity: the radix tree of a whole workload, and least-recently-used caches over it.

Owns what is cached where. A workload is known in advance, so its radix tree is built once and shared by all
caches; a cache is then a map from segment to how far it is held, and a request touches a handful of
segments instead of a thousand blocks.
"""

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

    Two plain maps from segment to how far it is held, both in order of use. What is touched moves to the end
    of ``_recent``; ``_older`` only shrinks, so its keys, listed once, are the order of eviction. When it is
    empty, ``_recent`` takes its place.
    """

    __slots__ = (
        "_older",
        "_oldest_last",
        "_parent",
        "_recent",
        "_start",
        "capacity_blocks",
        "evicted_blocks",
        "used_blocks",
    )

    def __init__(self, tree: PrefixTree, capacity_blocks: float) -> None:
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._oldest_last: list[int] = []  # all of _older, and what has left it
        self._parent: Sequence[int] = tree.parent
        self._start: Sequence[int] = tree.start
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.evicted_blocks = 0

    def hit_blocks(self, segment: int, end_block: int) -> int:
        """How many leading blocks of a path are held."""
        recent, older, parent = self._recent, self._older, self._parent
        while segment != ROOT:
            reach = recent.get(segment) or older.get(segment)
            if reach:
                return reach if reach < end_block else end_block
            segment = parent[segment]
        return 0

    def insert(self, segment: int, end_block: int) -> None:
        """The whole path is held and is the most recent; the oldest blocks leave if room is short."""
        recent, older, parent, start = self._recent, self._older, self._parent, self._start
        used = self.used_blocks
        end = end_block
        while segment != ROOT:
            begin = start[segment]
            reach = recent.pop(segment, 0) or older.pop(segment, begin)
            if reach < end:
                used += end - reach
                reach = end
            recent[segment] = reach
            segment = parent[segment]
            end = begin
        self.used_blocks = used
        if used > self.capacity_blocks:
            self._evict()

    def _evict(self) -> None:
        older, oldest_last, start = self._older, self._oldest_last, self._start
        excess = self.used_blocks - self.capacity_blocks
        total = 0
        while excess > 0:
            if not oldest_last:
                older, oldest_last = self._turn_over()
            segment = oldest_last[-1]
            reach = older.get(segment)
            if reach is None:  # used since it was listed
                oldest_last.pop()
                continue
            gone = reach - start[segment]
            if gone <= excess:
                del older[segment]
                oldest_last.pop()
            else:
                gone = ceil(excess)
                older[segment] = reach - gone
            excess -= gone
            total += gone
        self.used_blocks -= total
        self.evicted_blocks += total

    def _turn_over(self) -> tuple[dict[int, int], list[int]]:
        """What was recent is older from here on; returns it and its order, the oldest last."""
        self._older, self._recent = self._recent, {}
        self._oldest_last = list(reversed(self._older))
        return self._older, self._oldest_last

    def check_invariants(self) -> None:
        """Raises AssertionError if the count is off, a held segment hangs in the air or is held twice."""
        assert not self._recent.keys() & self._older.keys()
        held = self._older | self._recent
        assert self.used_blocks == sum(reach - self._start[segment] for segment, reach in held.items())
        for segment in held:
            above = self._parent[segment]
            assert above == ROOT or held[above] >= self._start[segment]
