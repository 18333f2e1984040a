"""What a workload asks of each part, per request: the input of the analytic screen.

Owns the averages. Caches are taken as large enough; the simulation afterwards knows better.
"""

from dataclasses import dataclass

from pdd.sim.cache import ROOT, PrefixCache
from pdd.sim.fleet import Parts, RoleModel
from pdd.sim.workload.stream import Paths, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """Averages over the requests.

    Args:
        input_tokens, output_tokens: Means.
        miss_tokens: Of the prompt, at the prefill cache.
        delta_tokens: Of the prompt, at MD's cache (which also holds answers).
        hit_ratio: Mean over requests at the prefill cache.
        misses: ``(tokens, cached tokens)`` of a sample of requests, for prefill times.
        deltas: Delta tokens of the same sample.
    """

    input_tokens: float
    output_tokens: float
    miss_tokens: float
    delta_tokens: float
    hit_ratio: float
    misses: tuple[tuple[int, int], ...]
    deltas: tuple[int, ...]


def profile_workload(workload: Workload, paths: Paths, *, sample: int = 4_000) -> WorkloadProfile:
    """The averages, from one pass with unbounded caches."""
    prefill, main = PrefixCache(paths.tree, float("inf")), PrefixCache(paths.tree, float("inf"))
    for request, blocks in workload.warm_blocks.items():
        segment = paths.prompt_segment[request]
        while segment != ROOT and paths.tree.start[segment] >= blocks:
            segment = paths.tree.parent[segment]
        prefill.insert(segment, blocks)
        main.insert(segment, blocks)
    size, count = workload.block_tokens, len(workload)
    misses, deltas = [], []
    hit_ratios = 0.0
    for request, tokens in enumerate(workload.input_tokens):
        segment, blocks = paths.prompt_segment[request], paths.prompt_blocks[request]
        miss = max(1, tokens - prefill.hit_blocks(segment, blocks) * size)
        misses.append((miss, tokens - miss))
        deltas.append(max(1, tokens - main.hit_blocks(segment, blocks) * size))
        hit_ratios += 1 - miss / tokens
        prefill.insert(segment, blocks)
        main.insert(paths.full_segment[request], paths.full_blocks[request])
    step = max(1, count // sample)
    return WorkloadProfile(
        input_tokens=sum(workload.input_tokens) / count,
        output_tokens=sum(workload.output_tokens) / count,
        miss_tokens=sum(miss for miss, _ in misses) / count,
        delta_tokens=sum(deltas) / count,
        hit_ratio=hit_ratios / count,
        misses=tuple(misses[::step]),
        deltas=tuple(deltas[::step]),
    )


def mean_prefill_s(profile: WorkloadProfile, model: RoleModel) -> float:
    """Engine time one request's uncached part takes, alone in its chunks."""
    chunk = model.section.chunk_tokens
    total = 0.0
    for miss, cached in profile.misses:
        done = 0
        while done < miss:
            step = min(chunk, miss - done)
            total += model.chunk_s(step, cached + done)
            done += step
    return total / len(profile.misses)


def relayed_share(
    profile: WorkloadProfile, parts: Parts, *, flow_bytes_per_s: float, slack_s: float
) -> tuple[float, float]:
    """``(share of requests whose transfer alone exceeds the slack, their mean transfer time)``."""
    times = [
        parts.kv.delta_bytes(profile.input_tokens, profile.input_tokens - delta) / flow_bytes_per_s
        for delta in profile.deltas
    ]
    beyond = [time for time in times if time > slack_s]
    return len(beyond) / len(times), sum(beyond) / len(beyond) if beyond else 0.0
