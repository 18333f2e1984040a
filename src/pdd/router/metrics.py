"""The router's metrics; ``docs/reference/router.md`` says what each means and what to do about it."""

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_STALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class RouterMetrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.requests = Counter(
            "pdd_requests_total", "Answers by pipeline and outcome", ["path", "outcome"], registry=r
        )
        self.decisions = Counter(
            "pdd_path_decisions_total", "Pipeline decisions by reason", ["path", "reason"], registry=r
        )
        self.not_relayable = Counter(
            "pdd_not_relayable_total",
            "Requests that must not be relayed, by what forbids it",
            ["what"],
            registry=r,
        )
        self.in_flight = Gauge("pdd_requests_in_flight", "Answers being computed", registry=r)
        self.ttft_s = Histogram(
            "pdd_ttft_seconds", "Arrival to first token", ["path"], buckets=_LATENCY_S, registry=r
        )
        self.second_token_s = Histogram(
            "pdd_second_token_seconds", "Arrival to second token", ["path"], buckets=_LATENCY_S, registry=r
        )
        self.max_itl_s = Histogram(
            "pdd_max_inter_token_seconds",
            "Longest gap between two tokens",
            ["path"],
            buckets=_STALL_S,
            registry=r,
        )
        self.prompt_tokens = Counter("pdd_prompt_tokens_total", "Prompt tokens of all answers", registry=r)
        self.output_tokens = Counter(
            "pdd_output_tokens_total",
            "Tokens given to clients, by the role that made them",
            ["role"],
            registry=r,
        )
        self.fast_path_tokens = Counter(
            "pdd_fast_path_tokens_total", "Tokens that the native fast path gave to clients", registry=r
        )
        self.fast_path_lanes = Counter(
            "pdd_fast_path_lanes_total", "Lanes of the fast path by why they ended", ["reason"], registry=r
        )
        self.outliers = Counter(
            "pdd_outliers_total",
            "Answers whose WAN transfer was held, by how they went on",
            ["result"],
            registry=r,
        )
        self.handoffs = Counter("pdd_handoff_total", "Handoffs from RLD to MD by mode", ["mode"], registry=r)
        self.handoff_rounds = Histogram(
            "pdd_handoff_rounds", "Catch-up rounds of a handoff", buckets=(1, 2, 3, 4, 8), registry=r
        )
        self.handoff_stall_s = Histogram(
            "pdd_handoff_stall_seconds",
            "Gap the client saw at the handoff",
            ["mode"],
            buckets=_STALL_S,
            registry=r,
        )
        self.eager_tokens = Histogram(
            "pdd_eager_tokens", "Eager tokens handed over", buckets=_TOKENS, registry=r
        )
        self.recomputed_tokens = Counter(
            "pdd_handoff_recomputed_tokens_total", "Tokens whose KV MD computed at handoffs", registry=r
        )
        self.shortfall_tokens = Counter(
            "pdd_handoff_shortfall_tokens_total",
            "Tokens whose KV had landed but was computed again",
            ["engine"],
            registry=r,
        )
        self.wan_bytes = Counter("pdd_wan_bytes_total", "Bytes put on the WAN", ["src", "dst"], registry=r)
        self.wan_transfer_s = Histogram(
            "pdd_wan_transfer_seconds",
            "Duration of transfers that landed over the WAN",
            buckets=_LATENCY_S,
            registry=r,
        )
        self.delta_saved_tokens = Counter(
            "pdd_delta_tokens_saved_total",
            "Tokens whose KV did not cross the WAN because MD held it",
            registry=r,
        )
        self.transfers = Counter(
            "pdd_transfers_total", "KV transfers by result", ["src", "dst", "result"], registry=r
        )
        self.leg_failures = Counter(
            "pdd_engine_failures_total",
            "Engine requests that failed, by kind",
            ["engine", "kind"],
            registry=r,
        )
        self.continuations = Counter(
            "pdd_continuations_total", "Answers continued elsewhere after a failure", registry=r
        )
        self.pauses = Counter(
            "pdd_pauses_total", "Answers that had to wait because no engine was left", registry=r
        )
        self.queued = Gauge("pdd_requests_queued", "Requests that wait for their turn", registry=r)
        self.refused = Counter(
            "pdd_requests_refused_total", "Requests that were not let in, by why", ["reason"], registry=r
        )
        self.breaker_open = Gauge(
            "pdd_engine_breaker_open", "1 if the engine failed too often lately", ["engine"], registry=r
        )
        self.auto_mode = Gauge(
            "pdd_handoff_auto_mode",
            "What automatic mode says: 1 catch-up, 0 one-shot",
            ["engine"],
            registry=r,
        )
        self.auto_switches = Counter(
            "pdd_handoff_auto_switches_total", "Changes of automatic mode", ["engine", "mode"], registry=r
        )
        self.hit_error = Histogram(
            "pdd_prefix_hit_error_chunks",
            "Chunks MD lacked beyond or below what was believed, without sign",
            ["engine"],
            buckets=(0, 1, 2, 4, 16, 64, 256, 1024),
            registry=r,
        )
        self.prefill_hit_error = Histogram(
            "pdd_prefill_hit_error_tokens",
            "Prompt tokens P found beyond or below what was believed, without sign",
            ["engine"],
            buckets=(0, 32, 64, 128, 512, 2048, 8192, 32768),
            registry=r,
        )
        self.kv_batches = Counter(
            "pdd_kv_event_batches_total",
            "Batches of KV events by what became of them",
            ["engine", "result"],
            registry=r,
        )
        self.errors = Counter("pdd_errors_total", "Error answers by HTTP status", ["status"], registry=r)
        self.engine_up = Gauge(
            "pdd_engine_up", "1 if the engine answers its health check", ["engine"], registry=r
        )
        self.engine_running = Gauge(
            "pdd_engine_requests_running",
            "Requests the router has open on the engine",
            ["engine"],
            registry=r,
        )
        self.peer_state = Gauge(
            "pdd_peer_state",
            "1 if KV can flow: the agent is followed and has its engine",
            ["engine"],
            registry=r,
        )
        self.incompatible = Gauge(
            "pdd_peer_incompatible",
            "1 if what the engines call KV differs, so that none can be sent",
            ["src", "dst"],
            registry=r,
        )
        self.belief_keys = Gauge(
            "pdd_cache_belief_chunks", "Chunks believed to be in the engine's store", ["engine"], registry=r
        )

        self.belief_blocks = Gauge(
            "pdd_cache_belief_device_blocks",
            "Blocks believed to be in the engine's device cache",
            ["engine"],
            registry=r,
        )

        self._keep_children()

    def _keep_children(self) -> None:
        """Every child is found with one look: a request asks for a dozen, and the library takes locks."""
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                metric.labels = cache(metric.labels)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))
