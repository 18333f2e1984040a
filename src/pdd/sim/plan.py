"""The planner: which fleet brings the best benefit-cost ratio within the SLO, what binds, and against what.

Owns the search over counts and line rates: all candidates through the analytic screen, a few through
simulation.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from math import inf
from typing import Any

from pdd.core.errors import ConfigurationError
from pdd.sim.capacity import Carried, WorkloadCache, find_capacity
from pdd.sim.cost import bcr_gain
from pdd.sim.fleet import Parts, build_parts, line_profile
from pdd.sim.profile import WorkloadProfile, profile_workload
from pdd.sim.scenario import BaselineSection, RoleSection, Scenario
from pdd.sim.screen import ScreenedFleet, UnitRates, screen_fleet, unit_rates

PLAN_REQUESTS = 8_000
"""Requests of one simulated trial: enough for a steady state, few enough for hundreds of trials."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFleet:
    """One ranked fleet.

    Args:
        screened: Its counts and what the screen said.
        goodput_rps: Simulated; None if only screened.
        bcr: Goodput per cost, simulated where available.
        bcr_gain: Against the baseline.
        binding: What binds: the simulation's word where there is one, else the screen's.
        figures: The run at the carried rate.
    """

    screened: ScreenedFleet
    goodput_rps: float | None
    bcr: float
    bcr_gain: float | None
    binding: str
    figures: dict[str, Any] | None


def plan(
    scenario: Scenario,
    *,
    on_progress: Progress | None = None,
    requests: int | None = None,
    finalists: int | None = None,
) -> dict[str, Any]:
    """Ranked fleets, the baselines, and the counts of what was looked at.

    Args:
        scenario: With a line; its fleet gives the chips and the middle of the ranges.
        on_progress: Told each step in words.
        requests: Of one simulated trial.
        finalists: Fleets to simulate; default: the scenario's.
    """
    say = on_progress or _quiet
    if scenario.line is None:
        raise ConfigurationError("pdd plan needs a [line]: it plans fleets over two datacenters")
    parts = build_parts(scenario)
    workloads = WorkloadCache(parts, requests or PLAN_REQUESTS)
    work, paths = workloads.at(scenario.workload.rate_per_s or 1.0)
    say("profiling the workload")
    profile = profile_workload(work, paths)
    baseline = plan_baseline(scenario, profile, workloads, say) if scenario.baseline is not None else None
    budget = scenario.plan.budget or (
        scenario.baseline.chips * scenario.baseline.cost if scenario.baseline else inf
    )
    screened = sorted(
        _screen(parts, profile, budget), key=lambda fleet: (-fleet.bcr, fleet.cost, fleet.prefill)
    )
    if not screened:
        raise ConfigurationError(
            f"plan: no candidate fleet costs at most {budget:g}; expected a larger plan.budget or fewer "
            f"engines"
        )
    say(f"screened {len(screened)} fleets")
    ranked: list[PlannedFleet] = []
    chosen_fleets = _distinct(screened, finalists if finalists is not None else scenario.plan.finalists)
    for fleet in chosen_fleets:
        carried = find_capacity(
            _with_fleet(parts, fleet), guess_rps=max(fleet.capacity_rps, 0.05), workloads=workloads
        )
        ranked.append(_planned(fleet, carried, baseline))
        say(
            f"simulated {fleet.prefill} P + {fleet.relay} RLD + {fleet.main} MD: "
            f"{carried.goodput_rps:.2f} req/s"
        )
    ranked.sort(key=lambda planned: -planned.bcr)
    chosen = {id(fleet) for fleet in chosen_fleets}
    ranked += [_planned(fleet, None, baseline) for fleet in screened if id(fleet) not in chosen][:20]
    return {
        "candidates": len(screened),
        "simulated": len(chosen_fleets),
        "profile": {key: value for key, value in asdict(profile).items() if key not in ("misses", "deltas")},
        "unit_rates": asdict(
            unit_rates(parts, profile, flow_bytes_per_s=line_profile(scenario.line).flow_bytes_per_s)
        ),
        "fleets": [_as_json(planned) for planned in ranked],
        "baselines": [baseline["summary"]] if baseline else [],
    }


def plan_baseline(
    scenario: Scenario, profile: WorkloadProfile, workloads: WorkloadCache, say: Progress
) -> dict[str, Any]:
    """The best split of the baseline's chips between prefill and decode in one datacenter, simulated."""
    section = scenario.baseline
    assert section is not None
    engines = section.chips // section.chips_per_engine
    rates = unit_rates(build_parts(one_site(scenario, section, 1, 1)), profile, flow_bytes_per_s=inf)
    splits = [
        screen_fleet(
            rates,
            prefill=count,
            relay=0,
            main=engines - count,
            line_rate_bytes_per_s=0.0,
            cost=section.chips * section.cost,
        )
        for count in range(1, engines)
    ]
    best = max(splits, key=lambda fleet: fleet.capacity_rps)
    found: list[tuple[Carried, ScreenedFleet]] = []
    for offset in (0, -round(engines * 0.05), round(engines * 0.05)):
        index = min(max(best.prefill - 1 + offset, 0), len(splits) - 1)
        fleet = splits[index]
        parts = build_parts(one_site(scenario, section, fleet.prefill, fleet.main))
        carried = find_capacity(parts, guess_rps=max(fleet.capacity_rps, 0.05), workloads=workloads)
        say(f"simulated baseline {fleet.prefill} P + {fleet.main} D: {carried.goodput_rps:.2f} req/s")
        found.append((carried, fleet))
    carried, fleet = max(found, key=lambda item: item[0].goodput_rps)
    summary = {
        "architecture": "one-site",
        "chip": section.chip,
        "prefill": fleet.prefill,
        "main": fleet.main,
        "goodput_rps": carried.goodput_rps,
        "cost": fleet.cost,
        "bcr": carried.goodput_rps / fleet.cost,
        "binding": binding_of(carried, fleet.binding),
        "second_token_s": carried.figures["second_token_s"],
    }
    return {"summary": summary, "rates": rates}


def one_site(scenario: Scenario, section: BaselineSection, prefill: int, main: int) -> Scenario:
    """The scenario of a homogeneous fleet in one datacenter, on the same traffic and SLO."""
    fleet = scenario.fleet
    change = {"chip": section.chip, "cost": section.cost, "chips_per_engine": section.chips_per_engine}

    def role(base: RoleSection, engines: int) -> RoleSection:
        return base.model_copy(update={**change, "engines": engines})

    one = fleet.model_copy(
        update={
            "architecture": "one-site",
            "prefill": role(fleet.prefill, prefill),
            "main": role(fleet.main, main),
            "relay": None,
        }
    )
    return scenario.model_copy(update={"fleet": one})


def binding_of(carried: Carried, fallback: str) -> str:
    """Which part broke the SLO just above the carried rate."""
    failing = carried.failing
    if failing is None:
        return fallback
    met = failing["slo_met"]
    if met["tpot"] < min(met["ttft"], met["second_token"]):
        return "main"
    if met["second_token"] >= met["ttft"] - 0.01:
        return "prefill"
    return "line" if failing["use"]["line"] > 0.9 else fallback if fallback != "prefill" else "memory"


def _quiet(_: str) -> None:
    """Nobody watches."""


def _screen(parts: Parts, profile: WorkloadProfile, budget: float) -> Iterator[ScreenedFleet]:
    scenario = parts.scenario
    fleet, options = scenario.fleet, scenario.plan
    assert scenario.line is not None
    lines = list(zip(options.line_rates, options.line_costs, strict=True)) or [
        (scenario.line.rate, scenario.line.cost)
    ]
    relay_section = fleet.relay
    unit = {
        name: parts.unit_cost(section, name) * section.chips_per_engine
        for name, section in (("prefill", fleet.prefill), ("main", fleet.main), ("relay", relay_section))
        if section is not None
    }
    rates_of: dict[float, UnitRates] = {}
    for rate, line_cost in lines:
        section = scenario.line.model_copy(update={"rate": rate, "cost": line_cost})
        rates_of[rate] = unit_rates(parts, profile, flow_bytes_per_s=line_profile(section).flow_bytes_per_s)
    default = {
        name: _around(section.engines) for name, section in (("prefill", fleet.prefill), ("main", fleet.main))
    }
    relays = options.relay or (_around(relay_section.engines) if relay_section is not None else (0,))
    for prefill, relay, main, (rate, line_cost) in product(
        options.prefill or default["prefill"], relays, options.main or default["main"], lines
    ):
        cost = prefill * unit["prefill"] + main * unit["main"] + relay * unit.get("relay", 0.0) + line_cost
        if cost <= budget:
            yield screen_fleet(
                rates_of[rate], prefill=prefill, relay=relay, main=main, line_rate_bytes_per_s=rate, cost=cost
            )


def _around(count: int) -> tuple[int, ...]:
    """From half to half as much again, every engine up to 12, else about 16 values."""
    low, high = max(1, count // 2), max(2, round(count * 1.5))
    return tuple(range(low, high + 1, max(1, (high - low) // 16)))


def _distinct(fleets: list[ScreenedFleet], count: int) -> list[ScreenedFleet]:
    """The best, leaving out near copies of one already chosen."""
    chosen: list[ScreenedFleet] = []
    for fleet in fleets:
        if all(
            abs(fleet.prefill - other.prefill) + abs(fleet.main - other.main)
            > 0.08 * (other.prefill + other.main)
            or abs(fleet.relay - other.relay) > max(1, other.relay // 2)
            or fleet.line_rate_bytes_per_s != other.line_rate_bytes_per_s
            for other in chosen
        ):
            chosen.append(fleet)
        if len(chosen) == count:
            break
    return chosen


def _with_fleet(parts: Parts, chosen: ScreenedFleet) -> Parts:
    scenario = parts.scenario
    fleet = scenario.fleet
    update = {
        "prefill": fleet.prefill.model_copy(update={"engines": chosen.prefill}),
        "main": fleet.main.model_copy(update={"engines": chosen.main}),
        "relay": fleet.relay.model_copy(update={"engines": chosen.relay})
        if fleet.relay is not None
        else None,
    }
    assert scenario.line is not None
    line = scenario.line.model_copy(update={"rate": chosen.line_rate_bytes_per_s})
    changed = scenario.model_copy(update={"fleet": fleet.model_copy(update=update), "line": line})
    return Parts(scenario=changed, chips=parts.chips, shape=parts.shape, kv=parts.kv)


def _planned(fleet: ScreenedFleet, carried: Carried | None, baseline: dict[str, Any] | None) -> PlannedFleet:
    goodput = carried.goodput_rps if carried is not None else fleet.capacity_rps
    gain = None
    if baseline is not None and baseline["summary"]["goodput_rps"] > 0 and carried is not None:
        gain = bcr_gain(
            goodput_rps=goodput,
            cost=fleet.cost,
            baseline_goodput_rps=baseline["summary"]["goodput_rps"],
            baseline_cost=baseline["summary"]["cost"],
        )
    return PlannedFleet(
        screened=fleet,
        goodput_rps=goodput if carried is not None else None,
        bcr=goodput / fleet.cost,
        bcr_gain=gain,
        binding=binding_of(carried, fleet.binding) if carried is not None else fleet.binding,
        figures=carried.figures if carried is not None else None,
    )


def _as_json(planned: PlannedFleet) -> dict[str, Any]:
    screened = planned.screened
    result: dict[str, Any] = {
        "prefill": screened.prefill,
        "relay": screened.relay,
        "main": screened.main,
        "line_gbit_per_s": screened.line_rate_bytes_per_s * 8 / 1e9,
        "cost": screened.cost,
        "screened_rps": screened.capacity_rps,
        "goodput_rps": planned.goodput_rps,
        "bcr": planned.bcr,
        "bcr_gain": planned.bcr_gain,
        "binding": planned.binding,
    }
    if planned.figures is not None:
        result |= {
            key: planned.figures[key]
            for key in ("ttft_s", "second_token_s", "relayed_share", "rld_token_share", "md_hit_mean", "use")
        }
    return result
