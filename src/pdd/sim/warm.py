"""What the caches hold before the first request: histories of sessions that run already, hot prefixes."""

from math import inf

from pdd.sim.cache import ROOT, PrefixTree
from pdd.sim.main_site import MainSite
from pdd.sim.prefill_pool import PrefillPool
from pdd.sim.workload.stream import Paths, Workload

HOT_PREFIX_SESSIONS = 3
"""A prefix is hot if at least so many sessions begin with it."""


def warm_up(workload: Workload, paths: Paths, mains: MainSite, pools: list[PrefillPool]) -> dict[int, int]:
    """Sessions that began before the window find their history on one MD and in the prefill caches.

    Returns:
        The MD of each such session's first request in the window.
    """
    homes: dict[int, int] = {}
    for order, (request, blocks) in enumerate(sorted(workload.warm_blocks.items(), reverse=True)):
        segment = warm_segment(paths, request, blocks)
        main = order % len(mains.caches)
        mains.caches[main].insert(segment, blocks)
        homes[request] = main
        for pool in pools:
            pool.warm(request, segment, blocks)
    return homes


def warm_segment(paths: Paths, request: int, blocks: int) -> int:
    """The segment in which the first ``blocks`` of a prompt end."""
    tree, segment = paths.tree, paths.prompt_segment[request]
    while segment != ROOT and tree.start[segment] >= blocks:
        segment = tree.parent[segment]
    return segment


def place_hot_prefixes(tree: PrefixTree, mains: MainSite) -> int:
    """Prefixes that many sessions begin with are on every MD; returns the blocks sent for that."""
    children: dict[int, int] = {}
    for above in tree.parent:
        children[above] = children.get(above, 0) + 1
    ends = {
        segment: inf for segment in children if segment != ROOT and children[segment] >= HOT_PREFIX_SESSIONS
    }
    for segment, above in enumerate(tree.parent):
        if above in ends:
            ends[above] = min(ends[above], tree.start[segment])
    hot = {segment: int(end) for segment, end in ends.items() if tree.parent[segment] == ROOT}
    for cache in mains.caches:
        for segment, end in hot.items():
            cache.insert(segment, end)
    return sum(end - tree.start[segment] for segment, end in hot.items()) * len(mains.caches)
