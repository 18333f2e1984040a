"""What real agent traces show, and what could beat the plain system: replays, each against plain PDD.

Owns the list of variants. Traces are read from a folder the user names; they are not part of the package.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pdd.sim.fleet import build_parts
from pdd.sim.scenario import Scenario
from pdd.sim.simulate import load_workload, run_parts
from pdd.sim.workload.stream import build_paths

AGENT_TRACES = ("cc_agent_local.jsonl.gz", "cc_agent_global.jsonl.gz")

SHARED_RELAYS = "RLD sharing P's engines"
VARIANTS: dict[str, dict[str, Any]] = {
    "WAN order: shortest, unmasked first": {"policy": {"wan_order": "shortest-unmasked-first"}},
    "adaptive relay threshold": {"policy": {"relay_stretch_ratio": 8.0}},
    "MD prefills deltas up to 512 tokens": {"policy": {"main_prefill_max_tokens": 512}},
    "MD prefills deltas up to 2048 tokens": {"policy": {"main_prefill_max_tokens": 2048}},
    "hot prefixes on every MD": {"policy": {"hot_prefix_copies": 1}},
    "that order, outliers last": {"policy": {"wan_order": "shortest-unmasked-first", "hold_outliers": True}},
    "wire codec, 1.3 times at 2 GB/s a transfer": {"line": {"compression_ratio": 1.3, "codec_rate": 2e9}},
    SHARED_RELAYS: {"fleet": {"relay_shares_prefill": True}},
}
"""Changes to a scenario's sections, by name."""


def variant(scenario: Scenario, name: str) -> Scenario:
    """The scenario with a variant's changes; where P's engines relay, the chips of RLD prefill as well."""
    fleet = scenario.fleet
    if name == SHARED_RELAYS and fleet.relay is not None:
        chips = fleet.relay.engines * fleet.relay.chips_per_engine
        more = chips // fleet.prefill.chips_per_engine
        prefill = fleet.prefill.model_copy(update={"engines": fleet.prefill.engines + more})
        scenario = changed(scenario, {"fleet": {"prefill": prefill}})
    return changed(scenario, VARIANTS[name])


def on_trace(scenario: Scenario, path: Path) -> Scenario:
    """The scenario fed by an agent trace."""
    workload = scenario.workload.model_copy(update={"kind": "agent-trace", "path": str(path)})
    return scenario.model_copy(update={"workload": workload})


def changed(scenario: Scenario, update: dict[str, dict[str, Any]]) -> Scenario:
    """The scenario with some keys of its sections replaced."""
    for section, values in update.items():
        part = getattr(scenario, section)
        scenario = scenario.model_copy(update={section: part.model_copy(update=values)})
    return scenario


def compare_variants(
    scenario: Scenario,
    *,
    rates_per_s: tuple[float, ...],
    requests: int,
    on_progress: Callable[[str], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Each variant against plain PDD on the same requests, at each rate."""
    for rate in rates_per_s:
        work = load_workload(scenario, rate_per_s=rate, requests=requests)
        paths = build_paths(work)
        plain = run_parts(build_parts(scenario), workload=work, paths=paths)
        if on_progress is not None:
            on_progress(f"plain PDD at {rate:g} req/s")
        yield _row("plain PDD", rate, plain, plain)
        for name in VARIANTS:
            figures = run_parts(build_parts(variant(scenario, name)), workload=work, paths=paths)
            if on_progress is not None:
                on_progress(f"{name} at {rate:g} req/s")
            yield _row(name, rate, figures, plain)


def _row(name: str, rate: float, figures: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    return {
        "variant": name,
        "rate_per_s": rate,
        "goodput_rps": figures["goodput_rps"],
        "bcr_change": figures["bcr"] / plain["bcr"] - 1 if plain["bcr"] else 0.0,
        "tpot_p99_s": figures["tpot_s"]["p99"],
        "prefill_use": figures["use"]["prefill"],
        "second_token_p50_s": figures["second_token_s"]["p50"],
        "second_token_p99_s": figures["second_token_s"]["p99"],
        "p99_change": figures["second_token_s"]["p99"] / plain["second_token_s"]["p99"] - 1,
        "wan_bytes": figures["wan_bytes"],
        "relayed_share": figures["relayed_share"],
        "md_hit_mean": figures["md_hit_mean"],
        "line_use": figures["use"]["line"],
    }


def drc_sizes(
    scenario: Scenario,
    *,
    sizes_bytes: tuple[float, ...],
    rate_per_s: float,
    requests: int,
    on_progress: Callable[[str], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """The same requests with a smaller and smaller decode-side cache per MD."""
    work = load_workload(scenario, rate_per_s=rate_per_s, requests=requests)
    paths = build_paths(work)
    for size in sizes_bytes:
        main = scenario.fleet.main.model_copy(update={"cache": size})
        fleet = scenario.fleet.model_copy(update={"main": main})
        figures = run_parts(
            build_parts(scenario.model_copy(update={"fleet": fleet})), workload=work, paths=paths
        )
        if on_progress is not None:
            on_progress(f"DRC of {size / 1e9:g} GB per MD")
        yield {
            "drc_gb_per_md": size / 1e9,
            "md_hit_mean": figures["md_hit_mean"],
            "wan_bytes": figures["wan_bytes"],
            "wan_bytes_without_drc": figures["wan_bytes_without_drc"],
            "relayed_share": figures["relayed_share"],
            "second_token_p99_s": figures["second_token_s"]["p99"],
            "goodput_rps": figures["goodput_rps"],
            "pipeline_shares": figures["pipeline_shares"],
            "hit_bins": figures["hit_bins"],
        }
