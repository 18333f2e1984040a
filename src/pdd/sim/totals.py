"""What a run counted about its parts, beside what it recorded about each request."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.sim.line import Line
from pdd.sim.main_site import MainSite
from pdd.sim.outcome import Outcome
from pdd.sim.prefill_pool import PrefillPool
from pdd.sim.workload.stream import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What a run counted about its parts.

    Args:
        end_s: When the last arrival came.
        events: Kernel events.
        num_in_flight, num_rejected, num_done: Their sum is the number of arrivals.
        prefill_busy_ratio, relay_busy_ratio, main_busy_ratio, line_busy_ratio: Mean use of each part; of
            RLD and MD the share of their tokens of KV that is reserved, of the line bytes over what it
            could carry.
        prefill_computed_tokens: By all prefill engines.
        main_evicted_tokens: Pushed out of the decode-side caches.
        wan_sent_bytes: Over the line, without what was cancelled in time.
        hot_bytes: Of these, for hot prefixes sent ahead.
    """

    end_s: float
    events: int
    num_in_flight: int
    num_rejected: int
    num_done: int
    prefill_busy_ratio: float
    relay_busy_ratio: float
    main_busy_ratio: float
    line_busy_ratio: float
    prefill_computed_tokens: int
    main_evicted_tokens: int
    wan_sent_bytes: float
    hot_bytes: float = 0.0


def count_totals(
    workload: Workload,
    outcome: Outcome,
    *,
    events: int,
    num_done: int,
    num_rejected: int,
    pools: Sequence[PrefillPool],
    mains: MainSite,
    line: Line | None,
    hot_bytes: float,
) -> RunTotals:
    """The totals of a run that has ended."""
    made = sum(workload.output_tokens)
    span_s = workload.arrival_s[-1] - workload.arrival_s[0] or 1.0
    relay_ratio = sum(outcome.relay_tokens) / made if made else 0.0
    evicted_blocks = sum(cache.evicted_blocks for cache in mains.caches)
    return RunTotals(
        end_s=workload.arrival_s[-1],
        events=events,
        num_in_flight=len(workload) - num_done - num_rejected,
        num_rejected=num_rejected,
        num_done=num_done,
        prefill_busy_ratio=sum(pool.busy_s for pool in pools)
        / span_s
        / sum(pool.num_engines for pool in pools),
        relay_busy_ratio=relay_ratio,
        main_busy_ratio=1 - relay_ratio if made else 0.0,
        line_busy_ratio=line.use_ratio(span_s) if line is not None else 0.0,
        prefill_computed_tokens=sum(pool.computed_tokens for pool in pools),
        main_evicted_tokens=evicted_blocks * workload.block_tokens,
        wan_sent_bytes=(line.sent_bytes if line is not None else 0.0) + hot_bytes,
        hot_bytes=hot_bytes,
    )
