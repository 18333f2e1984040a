"""What the simulator must show, each as a measured figure beside its expected one.

Owns the list. A claim that misses says so; no tolerance is widened to fit. The quick ones take seconds;
those that simulate fleets or replay traces are in ``claims_fleet`` and ``claims_traces``.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pdd.policy.wan_order import OrderParams
from pdd.sim.cost import bcr_gain
from pdd.sim.kv_bytes import IndexerLayout, KvFootprint, KvLayout, kv_footprint
from pdd.sim.line import LineProfile
from pdd.sim.model import load_model_config
from pdd.sim.prfaas import (
    KIB,
    PUBLISHED_KV_BYTES,
    PUBLISHED_PREFILL_S,
    PrfaasInputs,
    kv_throughput_bytes_per_s,
    prfaas_optimum,
    prfaas_throughput,
)
from pdd.sim.queueing import all_queue_checks
from pdd.sim.wan_bench import SPREAD_HITS, WanBench, run_wan_bench


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One line of the list.

    Args:
        id: Stable name, e.g. ``kv.deepseek-v3.bf16``.
        what: For people.
        expected: The published or exact figure; for a bound, the bound.
        measured: Ours.
        low, high: Range in which the claim holds.
        note: Assumption behind it, or why it misses.
    """

    id: str
    what: str
    expected: float
    measured: float
    low: float
    high: float
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether the figure is within its tolerance."""
        return self.low <= self.measured <= self.high


def within(
    claim_id: str, what: str, expected: float, measured: float, tolerance_ratio: float, note: str = ""
) -> Claim:
    """A claim that holds within a relative tolerance."""
    width = abs(expected) * tolerance_ratio
    return Claim(
        id=claim_id,
        what=what,
        expected=expected,
        measured=measured,
        low=expected - width,
        high=expected + width,
        note=note,
    )


KV_TABLE: tuple[tuple[str, KvLayout, IndexerLayout, float], ...] = (
    ("deepseek-v3", "bf16", "default", 70_272),
    ("deepseek-v3", "fp8_mla", "default", 40_016),
    ("deepseek-v3", "fp8", "default", 35_136),
    ("kimi-k2", "bf16", "default", 70_272),
    ("kimi-k2", "fp8_mla", "default", 40_016),
    ("deepseek-v3.2", "bf16", "default", 85_888),
    ("deepseek-v3.2", "fp8_mla", "default", 48_068),
    ("deepseek-v4-pro", "bf16", "default", 9_848),
    ("deepseek-v4-pro", "fp8", "fp8", 5_511),
    ("deepseek-v4-pro", "fp8", "fp4", 5_031),
    ("deepseek-v4-pro", "fp8", "none", 4_521),
    ("glm-5.2", "bf16", "default", 95_232),
    ("glm-5.2", "fp8_mla", "default", 53_940),
    ("qwen3-235b", "bf16", "default", 192_512),
    ("qwen3-235b", "fp8", "default", 96_256),
    ("minimax-m2.5", "bf16", "default", 253_952),
    ("minimax-m2.5", "fp8", "default", 126_976),
    ("llama-3.1-70b", "bf16", "default", 327_680),
    ("llama-3.1-70b", "fp8", "default", 163_840),
    ("qwen3.5-397b", "bf16", "default", 30_720),
    ("qwen3.5-397b", "fp8", "default", 15_360),
    ("gpt-oss-120b", "bf16", "default", 36_864),
    ("gpt-oss-120b", "fp8", "default", 18_432),
)
"""Model, layout, indexer layout, bytes per token, whole bytes as published."""


def kv_claims() -> list[Claim]:
    """The published table, exactly, and the article's two sums."""
    claims = []
    for model, layout, indexer, expected in KV_TABLE:
        measured = int(kv_footprint(load_model_config(model), layout, indexer=indexer).bytes_per_token)
        claims.append(
            within(
                f"kv.{model}.{layout}.{indexer}",
                f"{model} {layout}: KV bytes a token",
                expected,
                measured,
                0.0,
            )
        )
    v4_bf16, v4 = _v4("bf16", "default"), _v4("fp8", "none")
    state = kv_footprint(load_model_config("qwen3.5-397b"), "bf16").state_bytes
    window = v4.window_tokens * v4.window_bytes_per_token
    claims += [
        within(
            "kv.v4.window.bf16",
            "DeepSeek-V4-Pro bf16: window, MB",
            8.0,
            v4_bf16.fixed_bytes(10**6) / 1e6,
            0.005,
        ),
        within("kv.v4.window.fp8", "DeepSeek-V4-Pro fp8: window, MB", 4.56, window / 1e6, 0.005),
        within("kv.qwen3.5.state", "Qwen3.5-397B: fixed state, MB", 98.0, state / 1e6, 0.005),
        Claim(
            id="kv.80-requests",
            what="80 requests of 64K on DeepSeek-V4-Pro hold, GB",
            expected=23.5,
            measured=80 * v4.request_bytes(64_000) / 1e9,
            low=23.0,
            high=24.0,
            note="fp8 without indexer; 64K read as 64,000 tokens",
        ),
        Claim(
            id="kv.line-without-drc",
            what="80 req/s of 64K at 90 % hit need without DRC, Gbit/s",
            expected=180.0,
            measured=80 * v4.request_bytes(64_000) * 8 / 1e9,
            low=180.0,
            high=200.0,
        ),
        Claim(
            id="kv.line-with-drc",
            what="with DRC, as a share of that",
            expected=0.1,
            measured=v4.delta_bytes(64_000, 57_600) / v4.request_bytes(64_000),
            low=0.09,
            high=0.12,
            note="a little above a tenth: the windows of 4.56 MB cross whole",
        ),
    ]
    return claims


def _v4(layout: KvLayout, indexer: IndexerLayout) -> KvFootprint:
    return kv_footprint(load_model_config("deepseek-v4-pro"), layout, indexer=indexer)


LINE_COST = 0.335
"""In baseline chips: the middle of the 0.32-0.35 that the published BCRs imply."""


def cost_claims() -> list[Claim]:
    """The published arithmetic of costs."""
    claims = []
    for premium, expected in ((0.30, 0.324), (0.20, 0.375)):
        gain = bcr_gain(
            goodput_rps=11.5,
            cost=43 + 32 * (1 + premium) + LINE_COST,
            baseline_goodput_rps=9.0,
            baseline_cost=88,
        )
        claims.append(
            Claim(
                id=f"cost.bcr-{premium:.0%}",
                what=f"BCR gain at a premium of {premium:.0%}",
                expected=expected,
                measured=gain,
                low=expected - 0.001,
                high=expected + 0.001,
                note=f"line at {LINE_COST} baseline chips",
            )
        )
    return claims


def queue_claims(*, arrivals: int = 200_000) -> list[Claim]:
    """Queueing theory within 2 %, and conservation."""
    claims = []
    for check in all_queue_checks(arrivals=arrivals):
        name = check.name.lower().replace(" ", "-")
        claims.append(
            within(
                f"queue.{name}",
                f"{check.name}: mean time in system",
                check.expected_s,
                check.measured_s,
                0.02,
            )
        )
        claims.append(
            within(
                f"queue.{name}.conserved",
                f"{check.name}: done + in flight",
                check.arrivals,
                check.done + check.in_flight,
                0.0,
            )
        )
    return claims


def prfaas_claims() -> list[Claim]:
    """KV throughput of the published curves, and the optimum against brute force over its own equations."""
    claims = []
    for kib, mib, seconds in ((1, 190.8, 0.44), (8, 308.9, 0.72), (32, 701.3, 1.84), (128, 2316.3, 7.40)):
        measured = (
            kv_throughput_bytes_per_s(kib * KIB, kv_bytes=PUBLISHED_KV_BYTES, prefill_s=PUBLISHED_PREFILL_S)
            * 8
            / 1e9
        )
        expected = mib * 2**20 * 8 / seconds / 1e9
        claims.append(
            within(
                f"prfaas.kv-throughput-{kib}K", f"KV throughput at {kib}K, Gbit/s", expected, measured, 1e-9
            )
        )
    lengths = [256 * 1.08**step for step in range(80)]
    inputs = PrfaasInputs(
        uncached_tokens=lengths,
        kv_bytes=PUBLISHED_KV_BYTES,
        prefill_s=PUBLISHED_PREFILL_S,
        remote_engines=4,
        local_engines=8,
        line_bytes_per_s=100e9 / 8,
        decode_batch=64,
        decode_step_s=0.03,
        output_tokens=1_000,
    )
    thresholds = [1_000.0 * step for step in range(1, 100)]
    best = prfaas_optimum(inputs, thresholds=thresholds)
    brute = max(
        prfaas_throughput(inputs, threshold_tokens=threshold, local_prefill=count).lambda_rps
        for threshold in thresholds
        for count in range(1, 8)
    )
    claims.append(
        within(
            "prfaas.optimum",
            f"optimum at {best.threshold_tokens:.0f} tokens, {best.local_prefill} P + {best.local_decode} "
            f"D ({best.binding} binds), req/s",
            brute,
            best.lambda_rps,
            1e-9,
        )
    )
    return claims


def wan_claims(*, requests: int = 40_000) -> list[Claim]:
    """The WAN micro-benchmark. The published setting leaves the flow cap open; ours is the one published
    for a TCP flow.
    """
    kv = replace(_v4("fp8", "none"), window_tokens=0)
    bench = WanBench(
        requests=requests,
        rate_per_s=80,
        tokens=64_000,
        hit_bins=SPREAD_HITS,
        line=LineProfile(rate_bytes_per_s=20e9 / 8, rtt_s=0.03, flow_bytes_per_s=0.5e9 / 8, pool=1_000),
        order=OrderParams(order="first-come"),
    )
    figures = run_wan_bench(bench, kv, seed=1)
    note = (
        "0.5 Gbit/s a flow (one TCP flow at 56 ms and 1e-5 loss), one flow a transfer, pool unbounded, "
        "windows not counted"
    )
    return [
        within("wan.p50", "WAN micro-benchmark: P50, s", 0.248, figures["transfer_s"]["p50"], 0.25, note),
        within("wan.p99", "WAN micro-benchmark: P99, s", 18.883, figures["transfer_s"]["p99"], 0.25, note),
        within("wan.hit", "its mean hit", 0.90, figures["hit_mean"], 0.01),
    ]


QUICK: dict[str, Callable[[], Iterable[Claim]]] = {
    "kv": kv_claims,
    "cost": cost_claims,
    "prfaas": prfaas_claims,
    "queue": queue_claims,
    "wan": wan_claims,
}
"""Groups that need no trace and no fleet."""
