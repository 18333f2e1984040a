"""The commands as people run them: exit codes, JSON keys, one-file reports, and nothing half-written."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdd.cli.main import main

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"
PAPER, SMALL = str(SCENARIOS / "paper.toml"), str(SCENARIOS / "small.toml")


def _json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(argv) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_simulate_prints_the_promised_keys_and_repeats_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    html = tmp_path / "report.html"
    argv = ("simulate", SMALL, "--requests", "600", "--json", "--html", str(html))
    figures = _json(capsys, *argv)
    for key in ("ttft_s", "second_token_s", "e2e_s"):
        assert {"p50", "p90", "p99"} <= set(figures[key])
    assert {
        "goodput_rps", "pipeline_shares", "rld_token_share", "wan_bytes", "wan_bytes_without_drc",
        "md_hit_mean", "hit_bins", "cost_per_hour", "bcr",
    } <= set(figures)  # fmt: skip
    counts = figures["conservation"]
    assert counts["arrivals"] == counts["done"] + counts["rejected"] + counts["in_flight"]
    assert figures == _json(capsys, *argv)
    page = html.read_text()
    assert "<svg" in page
    assert "http" not in page
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("architecture", ["one-site", "naive", "pdd-with-p-rld"])
def test_every_architecture_runs(capsys: pytest.CaptureFixture[str], architecture: str) -> None:
    figures = _json(
        capsys,
        "simulate",
        SMALL,
        "--requests",
        "400",
        "--json",
        "--set",
        f'fleet.architecture="{architecture}"',
    )
    assert figures["architecture"] == architecture
    assert figures["conservation"]["done"] > 0


def test_prfaas_offloads_long_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    local = 'fleet.local_prefill={chip="H100-SXM",engines=4}'
    figures = _json(
        capsys,
        "simulate",
        SMALL,
        "--requests",
        "600",
        "--json",
        "--set",
        'fleet.architecture="prfaas"',
        "--set",
        local,
    )
    assert 0 < figures["wan_bytes"] < figures["wan_bytes_without_drc"]


def test_plan_ranks_fleets_with_what_binds_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdd.sim.plan.PLAN_REQUESTS", 500)
    result = _json(capsys, "plan", SMALL, "--json", "--set", "plan.finalists=2")
    assert result["candidates"] >= 50
    simulated = [fleet for fleet in result["fleets"] if fleet["goodput_rps"] is not None]
    assert len(simulated) == 2
    assert simulated == sorted(simulated, key=lambda fleet: -fleet["bcr"])
    assert {fleet["binding"] for fleet in result["fleets"]} <= {"prefill", "relay", "main", "memory", "line"}
    assert result["baselines"][0]["architecture"] == "one-site"


def test_feasible_answers_both_questions(capsys: pytest.CaptureFixture[str]) -> None:
    wide = _json(capsys, "feasible", PAPER, "--json")
    narrow = _json(capsys, "feasible", PAPER, "--json", "--set", 'line.rate="10gbit"')
    assert wide["bandwidth"]["feasible"]
    assert not narrow["bandwidth"]["feasible"]
    assert wide["bandwidth"]["without_drc_gbit_per_s"] > 5 * wide["bandwidth"]["with_drc_gbit_per_s"]


def test_bathtub_and_chips_write_reports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert _json(capsys, "bathtub", PAPER, "--json", "--html", str(tmp_path / "tub.html"))["valley"]["is_tub"]
    assert _json(capsys, "chips", "--json", "--html", str(tmp_path / "chips.html"))["chips"]
    assert "<svg" in (tmp_path / "tub.html").read_text()


def test_bench_ends_with_one_summary(capsys: pytest.CaptureFixture[str]) -> None:
    summary = _json(capsys, "bench", "sim", SMALL, "--sizes", "300,600", "--json")
    assert {"requests", "wall_s", "peak_rss_mb", "growth_exponent"} <= set(summary)


def test_claims_that_miss_end_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("bench", "sim", "--show", "cost", "--json")) == 0
    assert main(("bench", "sim", "--show", "wan", "--json")) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missed"] == ["wan.p50", "wan.p99"]


def test_bad_input_ends_in_two_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    capsys.readouterr()
    assert main(("simulate", SMALL, "--html", str(html), "--set", 'fleet.main.chip="H9000"')) == 2
    assert "fleet.main.chip" in capsys.readouterr().err
    assert not html.exists()
