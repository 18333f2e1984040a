"""The agent's metrics, read from its state when somebody asks, so that they cost nothing in between."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdd.agent.agent import Agent
from pdd.agent.space import Space

LINK_STATES = ("idle", "up", "down", "incompatible")


class AgentCollector(Collector):  # type: ignore[misc]  # prometheus_client is not typed for strict mode
    """Collects what ``docs/reference/agent.md`` lists."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        yield _gauge(
            "pdd_agent_engine_connected", "1 while the engine is connected", self._agent.is_engine_connected
        )
        refused = CounterMetricFamily(
            "pdd_agent_refused_connections", "Connections refused, by reason", labels=["reason"]
        )
        for reason, count in sorted(self._agent.refusal_counts().items()):
            refused.add_metric([reason], count)
        yield refused
        space = self._agent.space
        if space is None:
            return
        yield from _store_metrics(space)
        yield from _link_metrics(space)
        yield from _transfer_metrics(space)


def _store_metrics(space: Space) -> Iterator[Metric]:
    counts = space.store.counts()
    slots = GaugeMetricFamily("pdd_agent_store_slots", "Chunk slots by use", labels=["state"])
    slots.add_metric(["free"], counts.slots - counts.used)
    slots.add_metric(["leased"], counts.leased)
    slots.add_metric(["unleased"], counts.used - counts.leased)
    yield slots
    yield _gauge("pdd_agent_chunk_bytes", "Size of a chunk", space.kind.chunk_bytes)
    yield _counter("pdd_agent_store_evicted", "Chunks evicted to make room", space.store.num_evicted)


def _link_metrics(space: Space) -> Iterator[Metric]:
    state = GaugeMetricFamily("pdd_agent_link_state", "1 for the link's state", labels=["peer", "state"])
    rate = GaugeMetricFamily("pdd_agent_link_rate_bytes_per_second", "Measured rate", labels=["peer"])
    queued = GaugeMetricFamily("pdd_agent_link_queued_bytes", "Bytes wanted, not acked", labels=["peer"])
    breaker = GaugeMetricFamily("pdd_agent_link_breaker_open", "1 while attempts fail", labels=["peer"])
    attempts = CounterMetricFamily(
        "pdd_agent_link_attempts", "Connection attempts by result", labels=["peer", "result"]
    )
    trip = GaugeMetricFamily("pdd_agent_link_rtt_seconds", "Round trip by ping", labels=["peer"])
    loss = GaugeMetricFamily("pdd_agent_link_loss_ratio", "Part of segments sent again", labels=["peer"])
    for link in space.links.values():
        described = link.describe()
        for name in LINK_STATES:
            state.add_metric([link.peer, name], described["state"] == name)
        breaker.add_metric([link.peer], described["breaker"] == "open")
        for result, count in sorted(link.attempts.items()):
            attempts.add_metric([link.peer, result], count)
        queued.add_metric([link.peer], described["queued_bytes"])
        if described["rate_bytes_per_s"] is not None:
            rate.add_metric([link.peer], described["rate_bytes_per_s"])
        if described["rtt_s"] is not None:
            trip.add_metric([link.peer], described["rtt_s"])
        if described["loss_ratio"] is not None:
            loss.add_metric([link.peer], described["loss_ratio"])
    yield from (state, breaker, attempts, rate, queued, trip, loss)


def _transfer_metrics(space: Space) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "pdd_agent_transfers", "Transfers sent, a leg each, by outcome", labels=["outcome"]
    )
    for outcome, count in sorted(space.outbound.ended.items()):
        ended.add_metric([outcome], count)
    yield ended
    sent = CounterMetricFamily("pdd_agent_sent_bytes", "Bytes put on sockets", labels=["peer"])
    for link in space.links.values():
        sent.add_metric([link.peer], link.num_sent_bytes)
    yield sent
    unasked = CounterMetricFamily(
        "pdd_agent_unasked_bytes", "KV sent before it was asked for, by the answer", labels=["peer", "answer"]
    )
    for link in space.links.values():
        unasked.add_metric([link.peer, "lacking"], link.answers.num_lacking_bytes)
        unasked.add_metric([link.peer, "held"], link.answers.num_held_bytes)
    yield unasked
    saved = CounterMetricFamily("pdd_agent_codec_saved_bytes", "Bytes saved by coding", labels=["peer"])
    for link in space.links.values():
        saved.add_metric([link.peer], link.coder.num_saved_bytes)
    yield saved
    counters = space.inbound.counters
    yield _counter("pdd_agent_received_payload_bytes", "KV bytes received", counters.payload_bytes)
    yield _counter(
        "pdd_agent_dropped_bytes", "KV bytes dropped: late, or unasked in vain", counters.dropped_bytes
    )
    yield _counter("pdd_agent_corrupt_pieces", "Pieces with a wrong checksum", counters.corrupt_pieces)
    yield _counter("pdd_agent_landed", "Transfers landed here", counters.landed)
    yield _counter("pdd_agent_received_failed", "Transfers to here that failed", counters.failed)
    yield _counter("pdd_agent_leases_expired", "Leases nobody released in time", counters.leases_expired)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))
