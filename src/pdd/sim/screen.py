"""The analytic screen: what rate each part of a fleet carries, and which binds; microseconds per fleet.

Owns closed-form capacities. They ignore queues except through ``USABLE_RATIO``; finalists are simulated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from pdd.sim.fleet import Parts, RoleModel
from pdd.sim.profile import WorkloadProfile, mean_prefill_s, relayed_share

USABLE_RATIO = 0.85
"""Share of a part's capacity that is usable before its queue breaks an SLO; only ranks candidates for
simulation.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRates:
    """Requests per second one unit of each part carries under the workload.

    Args:
        prefill_rps: Per prefill engine.
        main_rps: Per main engine.
        relay_rps: Per relay engine, counted in all requests (relayed or not).
        delta_bytes: Mean bytes per request over the line.
        flow_bytes_per_s: Most one transfer gets on the line this was derived for.
        main_batch: Requests one main engine decodes at once.
        main_bound: ``memory`` if the KV capacity ends the batch, ``main`` if the time per token does.
    """

    prefill_rps: float
    main_rps: float
    relay_rps: float
    delta_bytes: float
    flow_bytes_per_s: float
    main_batch: float
    main_bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenedFleet:
    """A candidate with the rate it should carry.

    Args:
        prefill, relay, main: Engines.
        line_rate_bytes_per_s: 0 in one datacenter.
        capacity_rps: By part; the smallest binds.
        binding: Name of the part that binds: prefill, relay, main, memory or line.
        cost: Per hour, or in baseline chips.
    """

    prefill: int
    relay: int
    main: int
    line_rate_bytes_per_s: float
    capacity_rps: float
    binding: str
    cost: float

    @property
    def bcr(self) -> float:
        """Carried rate per cost."""
        return self.capacity_rps / self.cost


def decode_rate(model: RoleModel, *, context_tokens: float, output_tokens: float) -> tuple[float, float, str]:
    """``(requests per second, batch, bound)`` of one decode engine at a mean context, within its time per
    token.
    """
    times = model.decode
    by_memory = int(times.capacity_tokens / (context_tokens + output_tokens))
    limit = min(by_memory, len(times.base_s) - 1)
    batch = 0
    for size in range(1, limit + 1):
        if times.base_s[size] + times.per_context_s * size * context_tokens > times.max_step_s:
            break
        batch = size
    if not batch:
        return 0.0, 0.0, "memory" if not limit else "main"
    step = times.base_s[batch] + times.per_context_s * batch * context_tokens
    hold_s = output_tokens * step + context_tokens * model.load_s_per_token
    return batch / hold_s, batch, "memory" if batch == by_memory else "main"


def unit_rates(
    parts: Parts,
    profile: WorkloadProfile,
    *,
    flow_bytes_per_s: float,
    roles: Mapping[str, RoleModel] | None = None,
) -> UnitRates:
    """Rates of single units under a workload."""
    scenario = parts.scenario
    fleet = scenario.fleet
    prefill = parts.role(fleet.prefill, "prefill") if roles is None else roles["prefill"]
    main = parts.role(fleet.main, "main") if roles is None else roles["main"]
    context = profile.input_tokens + profile.output_tokens / 2
    main_rps, batch, bound = decode_rate(main, context_tokens=context, output_tokens=profile.output_tokens)
    relay_rps = inf
    if fleet.owned_relay is not None and flow_bytes_per_s < inf:
        relay = parts.role(fleet.owned_relay, "relay") if roles is None else roles["relay"]
        share, wan_s = relayed_share(
            profile, parts, flow_bytes_per_s=flow_bytes_per_s, slack_s=scenario.policy.second_token_slack
        )
        # RLD holds a request from its landing until the handoff: the WAN time, the load and a round trip.
        hold_s = (
            wan_s
            + profile.input_tokens * relay.load_s_per_token
            + (scenario.line.rtt if scenario.line else 0.0)
        )
        _, relay_batch, _ = decode_rate(relay, context_tokens=context, output_tokens=profile.output_tokens)
        relay_rps = relay_batch / (share * hold_s) if share and hold_s else inf
    shrink = scenario.line.compression_ratio if scenario.line else 1.0
    return UnitRates(
        prefill_rps=1 / mean_prefill_s(profile, prefill),
        main_rps=main_rps,
        relay_rps=relay_rps,
        delta_bytes=parts.kv.delta_bytes(profile.input_tokens, profile.input_tokens - profile.delta_tokens)
        / shrink,
        flow_bytes_per_s=flow_bytes_per_s,
        main_batch=batch,
        main_bound=bound,
    )


def screen_fleet(
    rates: UnitRates, *, prefill: int, relay: int, main: int, line_rate_bytes_per_s: float, cost: float
) -> ScreenedFleet:
    """The rate a fleet carries by its weakest part."""
    capacities = {
        "prefill": prefill * rates.prefill_rps * USABLE_RATIO,
        rates.main_bound: main * rates.main_rps * USABLE_RATIO,
    }
    if rates.relay_rps < inf:
        capacities["relay"] = relay * rates.relay_rps * USABLE_RATIO
    if line_rate_bytes_per_s:
        capacities["line"] = line_rate_bytes_per_s / rates.delta_bytes * USABLE_RATIO
    binding = min(capacities, key=lambda part: (capacities[part], part))
    return ScreenedFleet(
        prefill=prefill,
        relay=relay,
        main=main,
        line_rate_bytes_per_s=line_rate_bytes_per_s,
        capacity_rps=capacities[binding],
        binding=binding,
        cost=cost,
    )
