"""The two questions before anything is bought: is the line wide enough, and does the relay hide its latency?

Owns arithmetic that takes seconds, on a profile of the traffic.
"""

from dataclasses import asdict
from typing import Any

from pdd.core.errors import ConfigurationError
from pdd.sim.fleet import build_parts, line_profile
from pdd.sim.profile import profile_workload
from pdd.sim.scenario import Scenario
from pdd.sim.screen import screen_fleet, unit_rates
from pdd.sim.simulate import load_workload
from pdd.sim.workload.stream import build_paths

FEASIBLE_REQUESTS = 8_000


def feasible(scenario: Scenario) -> dict[str, Any]:
    """Bandwidth and latency feasibility of a scenario, each with its figures and a verdict."""
    if scenario.line is None:
        raise ConfigurationError("pdd feasible needs a [line]: it asks whether one carries the traffic")
    parts = build_parts(scenario)
    work = load_workload(scenario, requests=scenario.workload.requests or FEASIBLE_REQUESTS)
    rate = scenario.workload.rate_per_s or work.rate_per_s
    profile = profile_workload(work, build_paths(work))
    line = line_profile(scenario.line)
    kv, shrink = parts.kv, 1 / scenario.line.compression_ratio
    full = kv.request_bytes(profile.input_tokens) * shrink * rate
    delta = kv.delta_bytes(profile.input_tokens, profile.input_tokens - profile.delta_tokens) * shrink * rate
    rates = unit_rates(parts, profile, flow_bytes_per_s=line.flow_bytes_per_s)
    slack = scenario.policy.second_token_slack
    times = sorted(
        kv.delta_bytes(profile.input_tokens, profile.input_tokens - tokens) * shrink / line.flow_bytes_per_s
        + line.rtt_s
        for tokens in profile.deltas
    )
    beyond = [time for time in times if time > slack]
    fleet = scenario.fleet
    relay = fleet.relay.engines if fleet.relay is not None else 0
    screened = screen_fleet(
        rates,
        prefill=fleet.prefill.engines,
        relay=relay,
        main=fleet.main.engines,
        line_rate_bytes_per_s=line.rate_bytes_per_s,
        cost=1.0,
    )
    bandwidth_ok = delta <= line.rate_bytes_per_s * 0.9
    relays_needed = rate / rates.relay_rps if rates.relay_rps not in (0.0, float("inf")) else 0.0
    latency_ok = relays_needed <= max(relay, 0) if beyond else True
    return {
        "rate_per_s": rate,
        "profile": {key: value for key, value in asdict(profile).items() if key not in ("misses", "deltas")},
        "bandwidth": {
            "without_drc_gbit_per_s": full * 8 / 1e9,
            "with_drc_gbit_per_s": delta * 8 / 1e9,
            "line_gbit_per_s": line.rate_bytes_per_s * 8 / 1e9,
            "use": delta / line.rate_bytes_per_s,
            "feasible": bandwidth_ok,
        },
        "latency": {
            "slack_s": slack,
            "wan_p50_s": times[len(times) // 2],
            "wan_p99_s": times[int(len(times) * 0.99)],
            "beyond_slack_share": len(beyond) / len(times),
            "relays_needed": relays_needed,
            "relays_planned": relay,
            "feasible": latency_ok,
        },
        "carried_rps_screened": screened.capacity_rps,
        "binding": screened.binding,
        "verdict": _verdict(bandwidth_ok, latency_ok),
    }


def _verdict(bandwidth_ok: bool, latency_ok: bool) -> str:
    if bandwidth_ok and latency_ok:
        return "feasible: the line carries the missing KV and the relays hide its latency"
    if not bandwidth_ok:
        return (
            "not feasible: the line cannot carry even the missing KV; a wider line, smaller KV (fp8, "
            "codec) or higher hits are needed"
        )
    return (
        "the line is wide enough, but too few relays to hide its latency; more relay engines or a "
        "faster flow are needed"
    )
