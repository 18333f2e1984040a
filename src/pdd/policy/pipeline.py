"""Which of the two pipelines a request takes: P-MD, or P-RLD-MD with a relay that covers the WAN time.

Formula:
    ``wan_time_s = (queued_bytes + missing_bytes) / rate_bytes_per_s + rtt_s``; no relay is needed while
    that is within the second-token SLO.

Example:
    46 MB missing on a 25 MB/s line with 30 ms RTT take 1.87 s; with an SLO of 0.5 s the request is relayed.
"""

from dataclasses import dataclass
from typing import Literal

from pdd.policy.snapshot import DeltaView, EngineView, LinkView

Pipeline = Literal["p-md", "p-rld-md"]
Reason = Literal[
    "forced",
    "not_relayable",
    "no_relay_engine",
    "relay_full",
    "wan_within_slo",
    "wan_beyond_slo",
    "nothing_follows",
    "no_main_engine",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineInput:
    """Everything the choice looks at.

    Args:
        forced: The operator's choice, or ``auto``.
        not_relayable: Why the request's state cannot cross a relay, or None.
        link: The WAN path from P to the chosen MD.
        delta: What that MD lacks.
        relay: The chosen RLD, or None if there is none.
        main_reachable: Some MD is healthy and its agent is connected.
        second_token_slo_s: How long the second token may take after the first.
        max_tokens: Tokens asked for.
    """

    forced: Literal["auto", "p-md", "p-rld-md"]
    not_relayable: str | None
    link: LinkView
    delta: DeltaView
    relay: EngineView | None
    main_reachable: bool
    second_token_slo_s: float
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDecision:
    """The pipeline, why, and the WAN time it was decided on."""

    pipeline: Pipeline
    reason: Reason
    detail: str
    predicted_wan_s: float


def predicted_wan_s(link: LinkView, delta: DeltaView) -> float:
    """Seconds until the missing KV has crossed, behind what is queued already.

    A line that is down takes for ever, which is what makes the relay worth its cost.
    """
    if not link.up:
        return float("inf")
    return wan_time_s(
        queued_bytes=link.queued_bytes,
        missing_bytes=delta.missing_bytes,
        rate_bytes_per_s=link.rate_bytes_per_s,
        rtt_s=link.rtt_s,
    )


def wan_time_s(*, queued_bytes: int, missing_bytes: int, rate_bytes_per_s: float, rtt_s: float) -> float:
    """The formula on plain values."""
    return (queued_bytes + missing_bytes) / rate_bytes_per_s + rtt_s


def decide_pipeline(facts: PipelineInput) -> PipelineDecision:
    """The pipeline for one request."""
    wan_s = predicted_wan_s(facts.link, facts.delta)

    def decision(pipeline: Pipeline, reason: Reason, detail: str = "") -> PipelineDecision:
        return PipelineDecision(pipeline=pipeline, reason=reason, detail=detail, predicted_wan_s=wan_s)

    if facts.max_tokens <= 1:
        return decision("p-md", "nothing_follows")
    if facts.not_relayable is not None:
        return decision("p-md", "not_relayable", facts.not_relayable)
    if facts.forced == "p-md":
        return decision("p-md", "forced")
    if facts.relay is None:
        return decision("p-md", "no_relay_engine")
    if facts.forced == "p-rld-md":
        return decision("p-rld-md", "forced")
    if not facts.main_reachable:
        return decision("p-rld-md", "no_main_engine")
    return decision(
        *choose_by_wan_time(
            wan_s,
            second_token_slo_s=facts.second_token_slo_s,
            relay_running=facts.relay.running,
            relay_capacity=facts.relay.capacity,
        )
    )


def choose_by_wan_time(
    wan_s: float, *, second_token_slo_s: float, relay_running: int, relay_capacity: int
) -> tuple[Pipeline, Reason]:
    """The rule where both pipelines are possible and nothing is forced; on plain values, for callers that
    ask a million times.
    """
    if wan_s <= second_token_slo_s:
        return "p-md", "wan_within_slo"
    if relay_running >= relay_capacity:
        return "p-md", "relay_full"
    return "p-rld-md", "wan_beyond_slo"
