"""The one shape of a workload: columns of arrivals, lengths and prefix relations.

Owns the encoding (parent row and shared blocks) and how a workload is scaled and cut. Knows no file format.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdd.core.errors import ConfigurationError
from pdd.sim.cache import ROOT, PrefixTree


@dataclass(slots=True, kw_only=True)
class Workload:
    """Requests sorted by arrival.

    Args:
        name: For reports.
        block_tokens: Tokens of one prompt block.
        arrival_s: When each request arrives.
        input_tokens, output_tokens: Lengths.
        parent: Row whose first ``shared_blocks`` blocks this prompt repeats; -1 if none.
        shared_blocks: How many.
        keeps_output: Whether the prompt also repeats the parent's answer after the whole parent prompt.
        after: The row whose answer the client waits for before it sends this one; -1 if none.
        gap_s: How long after that answer this request comes, at the earliest.
        warm_blocks: Rows whose session began before the window: so many of their blocks are cached at the
            start.
        dropped: What was left out of the source and why, for people.
    """

    name: str
    block_tokens: int
    arrival_s: list[float]
    input_tokens: list[int]
    output_tokens: list[int]
    parent: list[int]
    shared_blocks: list[int]
    keeps_output: list[bool]
    after: list[int] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    warm_blocks: dict[int, int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate over the span."""
        span = self.arrival_s[-1] - self.arrival_s[0]
        return (len(self) - 1) / span if span > 0 else float("inf")

    def check(self, source: str) -> None:
        """Raises ConfigurationError, naming the source and row, if the columns make no sense."""
        if not len(self):
            raise ConfigurationError(f"{source}: holds no request; expected at least one")
        if not self.after:
            self.after, self.gap_s = [-1] * len(self), [0.0] * len(self)
        last = self.arrival_s[0]
        rows = zip(
            self.arrival_s, self.input_tokens, self.output_tokens, self.after, self.parent, strict=True
        )
        total = len(self)
        for row, (at, tokens_in, tokens_out, after, parent) in enumerate(rows):
            if at < last:
                raise ConfigurationError(
                    f"{source}, request {row}: arrives at {at:g} s after one at {last:g} s; expected "
                    f"sorted times"
                )
            last = at
            if tokens_in < 1 or tokens_out < 1:
                raise ConfigurationError(
                    f"{source}, request {row}: expected at least one token in and one out"
                )
            if after >= row:
                raise ConfigurationError(
                    f"{source}, request {row}: waits for request {after}, which is not earlier"
                )
            if parent >= total or parent == row:
                raise ConfigurationError(f"{source}, request {row}: parent {parent} is no other row")


@dataclass(slots=True, kw_only=True)
class Paths:
    """Where each request's prompt, and prompt with answer, lies in the prefix tree.

    Args:
        tree: Shared by all caches.
        prompt_segment, prompt_blocks: The prompt alone: what prefill computes.
        full_segment, full_blocks: With the answer: what the decode side holds afterwards.
    """

    tree: PrefixTree
    prompt_segment: list[int]
    prompt_blocks: list[int]
    full_segment: list[int]
    full_blocks: list[int]


def build_paths(workload: Workload, *, order: Sequence[int] | None = None) -> Paths:
    """The prefix tree of a workload.

    Args:
        workload: The requests; a parent must come before its children in ``order``.
        order: Rows in which parents precede children; default: as they arrive.
    """
    size, total = workload.block_tokens, len(workload)
    tree = PrefixTree()
    add = tree.add
    inputs, outputs = workload.input_tokens, workload.output_tokens
    prompt_branch, full_branch = [ROOT] * total, [ROOT] * total
    prompt_blocks = [tokens // size for tokens in inputs]
    full_blocks = [(tokens + out) // size for tokens, out in zip(inputs, outputs, strict=True)]
    parents, shared_blocks, keeps = workload.parent, workload.shared_blocks, workload.keeps_output
    for row in order if order is not None else range(total):
        parent, blocks = parents[row], prompt_blocks[row]
        if parent < 0:
            branch = add(ROOT, 0, blocks)
        elif keeps[row]:
            reach = full_blocks[parent]
            branch = add(full_branch[parent], reach if reach < blocks else blocks, blocks)
        else:
            shared = shared_blocks[row]
            branch = add(prompt_branch[parent], shared if shared < blocks else blocks, blocks)
        prompt_branch[row] = branch
        full_branch[row] = (
            add(branch, blocks, full_blocks[row]) if branch != ROOT else add(ROOT, 0, full_blocks[row])
        )
    tree.freeze()
    segment = tree.segment
    return Paths(
        tree=tree,
        prompt_segment=[
            segment(branch, blocks) for branch, blocks in zip(prompt_branch, prompt_blocks, strict=True)
        ],
        prompt_blocks=prompt_blocks,
        full_segment=[
            segment(branch, blocks) for branch, blocks in zip(full_branch, full_blocks, strict=True)
        ],
        full_blocks=full_blocks,
    )
