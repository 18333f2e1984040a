"""What the published agent trace shows; skipped without it (``PDD_TRACES``, or beside the checkout)."""

import os
from pathlib import Path

import pytest

from pdd.sim.cache import PrefixCache
from pdd.sim.claims_traces import VARIANTS, changed, drc_sizes, on_trace
from pdd.sim.fleet import build_parts
from pdd.sim.scenario_file import load_scenario
from pdd.sim.simulate import load_workload, run_parts
from pdd.sim.workload.agent import load_agent_trace
from pdd.sim.workload.stream import build_paths

ROOT = Path(__file__).parents[3]
TRACE = Path(os.environ.get("PDD_TRACES", ROOT.parent / "shared" / "traces")) / "cc_agent_global.jsonl.gz"
PAPER = load_scenario(ROOT / "examples" / "scenarios" / "paper.toml")
pytestmark = pytest.mark.skipif(not TRACE.exists(), reason="the agent trace is not here")


@pytest.mark.parametrize(
    ("cache_gb", "expected"), [(16, 0.100), (64, 0.450), (256, 0.908), (1024, 0.957), (1e9, 0.959)]
)
def test_a_finite_cache_hits_what_the_trace_study_found(cache_gb: float, expected: float) -> None:
    work = load_agent_trace(TRACE, seed=1, rate_per_s=None, requests=None)
    work.keeps_output = [False] * len(work)
    paths = build_paths(work)
    cache = PrefixCache(paths.tree, cache_gb * 1e9 / 50_000 / work.block_tokens)
    hits = 0
    for segment, blocks in zip(paths.prompt_segment, paths.prompt_blocks, strict=True):
        hits += cache.hit_blocks(segment, blocks) * work.block_tokens
        cache.insert(segment, blocks)
    assert hits / sum(work.input_tokens) == pytest.approx(expected, abs=0.0006)


def test_a_smaller_drc_starts_to_hurt_between_500_and_125_gb() -> None:
    rows = list(
        drc_sizes(on_trace(PAPER, TRACE), sizes_bytes=(1e12, 5e11, 1.25e11), rate_per_s=8.0, requests=6_000)
    )
    large, middle, small = rows
    assert middle["md_hit_mean"] == pytest.approx(large["md_hit_mean"], abs=0.005)
    assert small["md_hit_mean"] < large["md_hit_mean"] - 0.05
    assert small["goodput_rps"] < large["goodput_rps"] * 0.8
    assert large["wan_bytes"] < 0.1 * large["wan_bytes_without_drc"]
    assert large["pipeline_shares"]["p-md"] > 0.85
    assert sum(large["hit_bins"].values()) == pytest.approx(1.0)


def test_the_default_wan_order_pays_on_a_full_line() -> None:
    scenario = on_trace(PAPER, TRACE)
    work = load_workload(scenario, rate_per_s=14.0, requests=6_000)
    paths = build_paths(work)
    plain = run_parts(build_parts(scenario), workload=work, paths=paths)
    ordered = changed(scenario, VARIANTS["WAN order: shortest, unmasked first"])
    better = run_parts(build_parts(ordered), workload=work, paths=paths)
    assert better["bcr"] > plain["bcr"] * 1.1
    assert better["second_token_s"]["p50"] < plain["second_token_s"]["p50"] * 0.6
    # The longest pay for it, but not much: waiting ages them.
    assert better["second_token_s"]["p99"] < plain["second_token_s"]["p99"] * 1.1
