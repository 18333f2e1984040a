"""Statistics of a run: goodput, percentiles, shares, bytes, cost.

Owns the names in ``pdd simulate --json``. Only requests that arrived after the warm-up count.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pdd.sim.cost import fleet_cost_per_hour
from pdd.sim.fleet import Parts
from pdd.sim.outcome import P_RLD, PIPELINE_NAMES, Outcome
from pdd.sim.totals import RunTotals
from pdd.sim.workload.stream import Workload

HIT_BINS = (0.0, 0.90, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
"""Edges of the hit-rate bins, as the published workload is described."""


def percentiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """``p50, p90, p99, mean`` of some times; empty input gives zeros."""
    array = np.asarray(values, dtype=float)
    if not array.size:
        return {"p50": 0.0, "p90": 0.0, "p99": 0.0, "mean": 0.0}
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "mean": float(array.mean())}


def measure(
    parts: Parts, workload: Workload, outcome: Outcome, totals: RunTotals, *, arrival_s: Sequence[float]
) -> dict[str, Any]:
    """All figures of a run; ``arrival_s`` is when each request really came (later than planned if its turn
    had to wait).
    """
    arrival = np.asarray(arrival_s)
    begin, close = workload.arrival_s[0], workload.arrival_s[-1]
    warm = begin + parts.scenario.workload.warmup_ratio * (close - begin)
    counted = (arrival >= warm) & (arrival <= close)
    done = np.frombuffer(outcome.is_done, dtype=np.uint8).astype(bool) & counted
    first, second, end = (np.asarray(column) for column in (outcome.first_s, outcome.second_s, outcome.end_s))
    outputs, inputs = np.asarray(workload.output_tokens), np.asarray(workload.input_tokens)
    second = np.where(outputs > 1, second, first)
    ttft, second_token, e2e = first - arrival, second - arrival, end - arrival
    tpot = np.where(outputs > 2, (end - second) / np.maximum(outputs - 2, 1), 0.0)
    slo = parts.scenario.slo
    good = done & (ttft <= slo.ttft) & (second_token <= slo.second_token) & (tpot <= slo.tpot * TPOT_GRACE)
    window = max(close - warm, 1e-9)
    cost = fleet_cost_per_hour(parts.cost_lines())
    hits = np.asarray(outcome.main_hit_tokens) / inputs
    pipelines = np.frombuffer(outcome.pipeline, dtype=np.uint8)
    relay_tokens = np.asarray(outcome.relay_tokens)
    total = int(counted.sum())
    relayed = np.frombuffer(outcome.was_relayed, dtype=np.uint8).astype(bool)
    full = np.array([parts.kv.request_bytes(tokens) for tokens in workload.input_tokens])
    return {
        "architecture": parts.scenario.fleet.architecture,
        "workload": workload.name,
        "dropped": workload.dropped,
        "requests": len(workload),
        "measured_requests": total,
        "offered_rps": total / window,
        "goodput_rps": float(good.sum()) / window,
        "attainment": float(good.sum()) / total if total else 0.0,
        "slo_met": {
            "ttft": _share(done & (ttft <= slo.ttft), total),
            "second_token": _share(done & (second_token <= slo.second_token), total),
            "tpot": _share(done & (tpot <= slo.tpot * TPOT_GRACE), total),
        },
        "ttft_s": percentiles(ttft[done]),
        "second_token_s": percentiles(second_token[done]),
        "e2e_s": percentiles(e2e[done]),
        "tpot_s": percentiles(tpot[done]),
        "stall_s": percentiles(np.asarray(outcome.stall_s)[done & relayed]),
        "pipeline_shares": {
            name: _share((pipelines == code) & counted, total)
            for code, name in enumerate(PIPELINE_NAMES)
            if code
        },
        "relayed_share": _share(relayed & counted, total),
        "outlier_share": _share((pipelines == P_RLD) & counted, total),
        "rld_token_share": float(relay_tokens[done].sum() / max(outputs[done].sum(), 1)),
        "wan_bytes": float(np.asarray(outcome.wan_bytes)[counted].sum()),
        "wan_bytes_without_drc": float(full[counted].sum()),
        "md_hit_mean": float(hits[counted].mean()) if total else 0.0,
        "md_hit_weighted": float((hits * inputs)[counted].sum() / max(inputs[counted].sum(), 1)),
        "hit_bins": _bins(hits[counted]),
        "use": {
            "prefill": totals.prefill_busy_ratio,
            "line": totals.line_busy_ratio,
        },
        "wan_s": percentiles(
            (np.asarray(outcome.landed_s) - first)[done & (np.asarray(outcome.wan_bytes) > 0)].clip(min=0)
        ),
        "prefill_computed_tokens": totals.prefill_computed_tokens,
        "main_evicted_tokens": totals.main_evicted_tokens,
        "conservation": {
            "arrivals": len(workload),
            "done": totals.num_done,
            "rejected": totals.num_rejected,
            "in_flight": totals.num_in_flight,
        },
        "events": totals.events,
        "cost_per_hour": cost,
        "bcr": float(good.sum()) / window / cost,
    }


TPOT_GRACE = 1.05
"""Admission bounds the step of the moment; contexts grow while they decode, so the mean may exceed it a
little.
"""


def _share(mask: np.ndarray[Any, Any], total: int) -> float:
    return float(mask.sum()) / total if total else 0.0


def _bins(hits: np.ndarray[Any, Any]) -> dict[str, float]:
    result = {}
    for low, high in pairwise(HIT_BINS):
        inside = (hits >= low) & ((hits < high) if high < 1 else (hits <= high))
        result[f"{low:.0%}-{high:.0%}"] = _share(inside, len(hits))
    return result
