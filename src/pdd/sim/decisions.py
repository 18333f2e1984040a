"""All decisions of a run: the router's policies, asked with the simulator's snapshots.

Owns the step from the simulator's state to a policy's arguments. Where a snapshot would cost more than the
decision, the part of the policy that takes plain values is called. A test asks what a router recorded again
through this class and expects the recorded decisions.
"""

from dataclasses import dataclass

from pdd.policy.affinity import CacheCandidate, place_near_cache
from pdd.policy.handoff import HandoffDecision, HandoffParams, Mode, decide_handoff
from pdd.policy.outlier import LAST_PRIORITY, OutlierInput, decide_outlier
from pdd.policy.pipeline import choose_by_wan_time, wan_time_s
from pdd.policy.relay_threshold import RelayThresholdParams, relay_threshold_s
from pdd.sim.fleet import Parts
from pdd.sim.line import Line
from pdd.sim.main_site import MainSite
from pdd.sim.relay_site import RelaySite
from pdd.sim.scenario import PolicySection
from pdd.sim.workload.stream import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How KV gets to MD.

    Args:
        line: None in one datacenter.
        bytes_per_token: Put on it, after the codec.
        block_bytes: Of KV, before it.
        sent_shrink: Bytes on the line over bytes of KV.
        rtt_s: Of the line.
        flow_bytes_per_s: Most one transfer gets.
        fast_bytes_per_s: Of the fabric inside a site.
    """

    line: Line | None
    bytes_per_token: float
    block_bytes: int
    sent_shrink: float
    rtt_s: float
    flow_bytes_per_s: float
    fast_bytes_per_s: float


class Decisions:
    """Where each request goes, and how."""

    __slots__ = (
        "_block_tokens",
        "_crossing",
        "_handoff_params",
        "_homes",
        "_inputs",
        "_main_prefill_max_tokens",
        "_mains",
        "_may_end_on_relay",
        "_offload_above",
        "_outputs",
        "_parent",
        "_policy",
        "_relays",
        "_threshold_s",
    )

    def __init__(
        self,
        parts: Parts,
        workload: Workload,
        *,
        mains: MainSite,
        relays: RelaySite | None,
        crossing: Crossing,
        homes: dict[int, int],
    ) -> None:
        fleet, policy = parts.scenario.fleet, parts.scenario.policy
        self._policy, self._mains, self._relays, self._crossing = policy, mains, relays, crossing
        self._homes, self._parent, self._block_tokens = homes, workload.parent, workload.block_tokens
        self._inputs, self._outputs = workload.input_tokens, workload.output_tokens
        self._offload_above = fleet.offload_above_tokens
        self._main_prefill_max_tokens = policy.main_prefill_max_tokens
        self._may_end_on_relay = fleet.architecture == "pdd-with-p-rld"
        self._handoff_params = _handoff_params(policy)
        capacity = relays.capacity if relays is not None else 1
        params = RelayThresholdParams(stretch_ratio=policy.relay_stretch_ratio)
        self._threshold_s = [
            relay_threshold_s(
                second_token_slo_s=policy.second_token_slack, relay_load_ratio=load / capacity, params=params
            )
            for load in range(capacity + 1)
        ]

    def main_for(self, request: int) -> int:
        """The request belongs to an MD; returns the tokens that one holds of its prompt."""
        mains = self._mains
        chosen = mains.least
        hit = mains.hit_tokens(request, chosen)
        home = self._homes.get(request, -1)
        if home < 0:
            parent = self._parent[request]
            home = mains.of[parent] if parent >= 0 else -1
        if home >= 0 and home != chosen:
            home_hit = mains.hit_tokens(request, home)
            # With room at home there is no wait and less to send: the policy could only say the same.
            if home_hit > hit and (
                not mains.wait_s(request, home) or self._prefers_home(request, home, home_hit, chosen, hit)
            ):
                chosen, hit = home, home_hit
        mains.take(request, chosen)
        return hit

    def _prefers_home(self, request: int, home: int, home_hit: int, other: int, hit: int) -> bool:
        mains = self._mains
        decision = place_near_cache(
            CacheCandidate(
                id=engine,
                wait_s=mains.wait_s(request, engine),
                work_s=self._cross_s(self._inputs[request] - held),
            )
            for engine, held in ((home, home_hit), (other, hit))
        )
        return decision.id == home

    def _cross_s(self, tokens: int) -> float:
        crossing = self._crossing
        rate = crossing.line.share_bytes_per_s if crossing.line is not None else crossing.fast_bytes_per_s
        return tokens * crossing.bytes_per_token / rate

    def prefills_on_main(self, missing_tokens: int, hit_tokens: int) -> bool:
        """Whether MD computes the tail itself."""
        return hit_tokens > 0 and missing_tokens <= self._main_prefill_max_tokens

    def prefills_locally(self, uncached_tokens: int) -> bool:
        """Whether a prompt stays in the local cluster (PrfaaS)."""
        return uncached_tokens <= self._offload_above

    def relay_for(self, request: int, missing_tokens: int) -> int:
        """The relay that covers the WAN time of the request, or -1: P-MD."""
        crossing, relays = self._crossing, self._relays
        line = crossing.line
        assert line is not None
        assert relays is not None
        relay = relays.least
        capacity = relays.capacity
        # Where low hits may end on RLD, its being full sends nobody elsewhere: that is what the pipeline
        # rule forbids.
        running = 0 if self._may_end_on_relay else relays.load[relay]
        rate = line.share_bytes_per_s
        wan_s = wan_time_s(
            queued_bytes=int(line.queue_s() * rate) if line.waiting_bytes else 0,
            missing_bytes=-(-missing_tokens // self._block_tokens) * crossing.block_bytes,
            rate_bytes_per_s=rate / crossing.sent_shrink,
            rtt_s=crossing.rtt_s,
        )
        pipeline, _ = choose_by_wan_time(
            wan_s,
            # Beyond its capacity a relay queues: the threshold stays that of a full one.
            second_token_slo_s=self._threshold_s[running if running < capacity else capacity],
            relay_running=running,
            relay_capacity=capacity,
        )
        if pipeline == "p-md":
            return -1
        # A single token needs no second engine; a prompt larger than the relay's memory cannot have one.
        tokens, output = self._inputs[request], self._outputs[request]
        return relay if output > 1 and relays.engines[relay].fits_ever(tokens, output) else -1

    def wan_priority(self, request: int, num_bytes: float, *, known_ratio: float) -> int:
        """The priority of a relayed request's transfer: the fuller the relay, the higher; outliers last.

        ``known_ratio`` is the share of the prompt that P had cached.
        """
        relays = self._relays
        assert relays is not None
        if self._policy.hold_outliers and self._is_outlier(relays, request, num_bytes, known_ratio):
            return LAST_PRIORITY
        return round(100 * min(1.0, relays.load_ratio(request)))

    def _is_outlier(self, relays: RelaySite, request: int, num_bytes: float, known_ratio: float) -> bool:
        """Whether RLD will end the answer before so many bytes have crossed."""
        line = self._crossing.line
        assert line is not None
        facts = OutlierInput(
            relayed=True,
            predicted_wan_s=num_bytes / line.share_bytes_per_s + line.queue_s(),
            max_tokens=int(self._policy.outlier_output_tokens),
            history_tokens=None,
            relay_itl_s=relays.engine(request).step_s,
            margin_ratio=self._policy.outlier_margin_ratio,
            known_ratio=known_ratio,
            returning_ratio=self._policy.outlier_returning_ratio,
        )
        return decide_outlier(facts).is_outlier

    def handoff(self, *, gap_tokens: float, relay_load_ratio: float, previous: Mode) -> HandoffDecision:
        """How a request moves from RLD to MD."""
        return decide_handoff(
            gap_tokens=int(gap_tokens),
            relay_load_ratio=relay_load_ratio,
            previous=previous,
            params=self._handoff_params,
        )


def _handoff_params(policy: PolicySection) -> HandoffParams:
    return HandoffParams(
        forced="auto",
        one_shot_max_gap_tokens=policy.one_shot_max_gap_tokens,
        catch_up_gap_tokens=policy.catch_up_gap_tokens,
        catch_up_max_rounds=policy.catch_up_max_rounds,
        block_tokens=policy.block_tokens,
        busy_ratio=policy.busy_ratio,
        idle_ratio=policy.idle_ratio,
    )
