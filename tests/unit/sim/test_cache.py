"""The segment cache behaves as a cache of single blocks would, and its radix tree keeps common prefixes."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.sim.cache import PrefixCache
from pdd.sim.workload.stream import Workload, build_paths

Row = tuple[int, int, int]


def _workload(rows: list[tuple[int, int, int]]) -> Workload:
    return Workload(
        name="test",
        block_tokens=1,
        arrival_s=[float(index) for index in range(len(rows))],
        input_tokens=[row[2] for row in rows],
        output_tokens=[1] * len(rows),
        parent=[row[0] for row in rows],
        shared_blocks=[row[1] for row in rows],
        keeps_output=[False] * len(rows),
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[Row]:
    rows: list[Row] = []
    for index in range(draw(st.integers(1, 25))):
        parent = draw(st.integers(-1, index - 1))
        longest = rows[parent][2] if parent >= 0 else 0
        shared = draw(st.integers(0, longest)) if parent >= 0 else 0
        rows.append((parent if shared else -1, shared, max(1, shared + draw(st.integers(0, 12)))))
    return rows


def _block_paths(rows: list[Row]) -> list[list[int]]:
    paths: list[list[int]] = []
    fresh = 0
    for parent, shared, blocks in rows:
        head = paths[parent][:shared] if shared else []
        paths.append(head + list(range(fresh, fresh + blocks - len(head))))
        fresh += blocks - len(head)
    return paths


@settings(max_examples=150, deadline=None)
@given(rows=workloads(), capacity=st.integers(12, 60))
def test_segments_equal_a_block_level_lru(rows: list[Row], capacity: int) -> None:
    longest = max(row[2] for row in rows)
    if longest > capacity:
        capacity = longest
    work = _workload(rows)
    paths = build_paths(work)
    cache = PrefixCache(paths.tree, capacity)
    blocks: OrderedDict[int, None] = OrderedDict()
    for row, path in enumerate(_block_paths(rows)):
        expected = 0
        while expected < len(path) and path[expected] in blocks:
            expected += 1
        assert cache.hit_blocks(paths.prompt_segment[row], paths.prompt_blocks[row]) == expected
        for block in reversed(path):  # deepest first, so that the root is the most recent
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > capacity:
            blocks.popitem(last=False)
        cache.insert(paths.prompt_segment[row], paths.prompt_blocks[row])
        cache.check_invariants()


def test_an_answer_is_found_by_the_turn_that_keeps_it() -> None:
    work = _workload([(-1, 0, 10), (0, 10, 18)])
    work.output_tokens[0] = 5
    work.keeps_output[1] = True
    paths = build_paths(work)
    prefill, main = PrefixCache(paths.tree, 1_000), PrefixCache(paths.tree, 1_000)
    prefill.insert(paths.prompt_segment[0], paths.prompt_blocks[0])
    main.insert(paths.full_segment[0], paths.full_blocks[0])
    assert prefill.hit_blocks(paths.prompt_segment[1], 18) == 10
    assert main.hit_blocks(paths.prompt_segment[1], 18) == 15
