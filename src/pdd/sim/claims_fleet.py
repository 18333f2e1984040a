"""The claims that simulate fleets: the order of architectures, the relay's share, the collapse, the
planner's optimum.

Owns how each is set up from one scenario (the published fleet). Rates and lengths are stated with each
figure.
"""

from collections.abc import Callable
from typing import Any

from pdd.core.errors import ConfigurationError
from pdd.sim.claims import Claim, within
from pdd.sim.plan import one_site, plan
from pdd.sim.scenario import Architecture, Scenario
from pdd.sim.simulate import load_workload, simulate
from pdd.sim.workload.stream import build_paths

BASELINE_SPLIT = 0.24
"""Share of the baseline's chips that prefill in the order claims; the planner's own best split."""


def with_architecture(scenario: Scenario, architecture: Architecture, **fleet: Any) -> Scenario:
    """The scenario under another architecture."""
    changed = scenario.fleet.model_copy(update={"architecture": architecture, **fleet})
    return scenario.model_copy(update={"fleet": changed})


def order_claims(scenario: Scenario, *, rate_per_s: float, requests: int = 12_000) -> list[Claim]:
    """Second-token times of the architectures on the same requests at one rate."""
    if scenario.baseline is None:
        raise ConfigurationError("the order claims need a [baseline]")
    work = load_workload(scenario, rate_per_s=rate_per_s, requests=requests)
    paths = build_paths(work)
    engines = scenario.baseline.chips // scenario.baseline.chips_per_engine
    prefill = max(1, round(engines * BASELINE_SPLIT))
    runs = {
        "one": simulate(
            one_site(scenario, scenario.baseline, prefill, engines - prefill),
            workload=work,
            paths=paths,
        ),
        "naive": simulate(with_architecture(scenario, "naive"), workload=work, paths=paths),
        "bare": simulate(with_architecture(scenario, "naive", main_cache=False), workload=work, paths=paths),
        "pdd": simulate(scenario, workload=work, paths=paths),
    }
    second = {name: run["second_token_s"] for name, run in runs.items()}
    note = f"second-token time at {rate_per_s:g} req/s"
    pdd = runs["pdd"]
    return [
        Claim(
            id="order.one-site",
            what="PDD's median second token over one datacenter's",
            expected=1.0,
            measured=second["pdd"]["p50"] / second["one"]["p50"],
            low=1.0,
            high=1.5,
            note=note,
        ),
        Claim(
            id="order.naive-without-drc",
            what="naive's (no DRC) median second token over PDD's",
            expected=2.0,
            measured=second["bare"]["p50"] / second["pdd"]["p50"],
            low=2.0,
            high=float("inf"),
            note=note,
        ),
        within(
            "order.p99-cut",
            "cut of naive's (with DRC) P99",
            0.515,
            1 - second["pdd"]["p99"] / second["naive"]["p99"],
            0.2,
            note,
        ),
        within("relay.tokens", "share of tokens that RLD makes", 0.062, pdd["rld_token_share"], 0.25, note),
        Claim(
            id="relay.requests",
            what="share of requests that are relayed",
            expected=0.25,
            measured=pdd["relayed_share"],
            low=0.20,
            high=0.30,
            note=note,
        ),
        within(
            "conservation",
            "arrivals = done + rejected + in flight",
            pdd["conservation"]["arrivals"],
            sum(pdd["conservation"][key] for key in ("done", "rejected", "in_flight")),
            0.0,
        ),
    ]


def collapse_claims(scenario: Scenario, *, rate_per_s: float, requests: int = 12_000) -> list[Claim]:
    """P-RLD allowed against PDD at a load PDD carries."""
    work = load_workload(scenario, rate_per_s=rate_per_s, requests=requests)
    paths = build_paths(work)
    plain = simulate(scenario, workload=work, paths=paths)
    allowed = simulate(with_architecture(scenario, "pdd-with-p-rld"), workload=work, paths=paths)
    return [
        Claim(
            id="collapse.pdd-carries",
            what=f"PDD's attainment at {rate_per_s:g} req/s",
            expected=scenario.slo.attainment_ratio,
            measured=plain["attainment"],
            low=scenario.slo.attainment_ratio,
            high=1.0,
        ),
        Claim(
            id="collapse.attainment",
            what="attainment with P-RLD allowed",
            expected=0.5,
            measured=allowed["attainment"],
            low=0.0,
            high=scenario.slo.attainment_ratio * 0.9,
        ),
        Claim(
            id="collapse.hit",
            what="MD's hit rate with P-RLD allowed, below PDD's by",
            expected=0.05,
            measured=plain["md_hit_mean"] - allowed["md_hit_mean"],
            low=0.03,
            high=1.0,
        ),
        Claim(
            id="collapse.relay",
            what="RLD's share of tokens with P-RLD allowed, over PDD's",
            expected=5.0,
            measured=allowed["rld_token_share"] / max(plain["rld_token_share"], 1e-9),
            low=3.0,
            high=float("inf"),
        ),
    ]


def planner_claims(
    scenario: Scenario,
    *,
    on_progress: Callable[[str], None] | None = None,
    requests: int | None = None,
    finalists: int | None = None,
) -> list[Claim]:
    """The planner's optimum and gain beside the published fleet, by shorter trials if asked."""
    result = plan(scenario, on_progress=on_progress, requests=requests, finalists=finalists)
    best, base = result["fleets"][0], result["baselines"][0]
    gain = best["goodput_rps"] / base["goodput_rps"] - 1
    return [
        within("plan.prefill", "P engines of the best fleet", 40, best["prefill"], 0.15),
        Claim(
            id="plan.relay",
            what="RLD engines of the best fleet",
            expected=3,
            measured=best["relay"],
            low=2,
            high=4,
        ),
        within("plan.main", "MD engines of the best fleet", 32, best["main"], 0.15),
        within("plan.goodput-gain", "its goodput over the baseline's", 0.278, gain, 0.15),
        within("plan.bcr-gain", "its BCR gain", 0.35, best["bcr_gain"], 0.10),
        within("plan.baseline", "goodput of the baseline of 88 H100", 9.0, base["goodput_rps"], 0.10),
    ]


def sensitivity(scenario: Scenario, changes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The screen's best fleet and baseline for each change of an assumption, as ``{section: {key:
    value}}``.
    """
    rows = []
    for name, update in changes.items():
        changed = scenario
        for section, values in update.items():
            part = getattr(changed, section).model_copy(update=values)
            changed = changed.model_copy(update={section: part})
        result = plan(changed, requests=4_000, finalists=1)
        best, base = result["fleets"][0], result["baselines"][0]
        rows.append(
            {
                "change": name,
                "fleet": f"{best['prefill']} P + {best['relay']} RLD + {best['main']} MD",
                "binding": best["binding"],
                "goodput_rps": best["goodput_rps"],
                "baseline_rps": base["goodput_rps"],
                "goodput_gain": best["goodput_rps"] / base["goodput_rps"] - 1,
                "bcr_gain": best["bcr_gain"],
            }
        )
    return rows
