"""A wrong scenario is refused with the key and what was expected there."""

import gzip
from pathlib import Path

import pytest

from pdd.core.errors import ConfigurationError
from pdd.sim.cost import CostLine, fleet_cost_per_hour
from pdd.sim.fleet import build_parts
from pdd.sim.scenario_file import load_scenario
from pdd.sim.simulate import load_workload

PAPER = Path(__file__).parents[3] / "examples" / "scenarios" / "paper.toml"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("line.rat='\"5gbit\"'", "line.rat: unknown key"),
        ('line.rate="5parsec"', "line.rate: '5parsec' is not a rate"),
        ("fleet.main.engines=0", "at least one prefill and one main engine"),
        ("fleet.relay.engines=0", "fleet.relay is required"),
        ("fleet.main.cost=0.0", "fleet.main.cost"),
        ("line.cost=0", "line.cost"),
        ("slo.tpot=-1", "slo.tpot"),
        ('workload.kind="agent-trace"', "workload.path is required"),
        ("plan.line_rates=[1e9]", "plan.line_costs"),
    ],
)
def test_a_bad_key_is_named(override: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_scenario(PAPER, overrides=(override,))
    assert expected in str(caught.value)
    assert "paper.toml" in str(caught.value)


def test_an_override_without_a_value_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"section\.key=value"):
        load_scenario(PAPER, overrides=("line.rate",))


def test_a_missing_file_and_broken_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.toml"):
        load_scenario(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("a = [1,")
    with pytest.raises(ConfigurationError, match=r"broken\.toml is not valid TOML"):
        load_scenario(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('model.config="deepseek-v3"', "weights do not fit 1 x H100-SXM"),
        ('fleet.prefill.chip="H9000"', "fleet.prefill.chip: 'H9000' is not in the table"),
        ('model.config="no-such-model"', "neither a bundled model"),
        ('model.kv_layout="fp8_mla"', "only for MLA models"),
    ],
)
def test_an_impossible_fleet_is_named(override: str, expected: str) -> None:
    scenario = load_scenario(PAPER, overrides=(override,))
    with pytest.raises(ConfigurationError, match=expected):
        build_parts(scenario).role(scenario.fleet.prefill, "prefill")


def test_a_price_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="price of line"):
        fleet_cost_per_hour((CostLine(what="line", units=1, unit_cost_per_hour=0.0),))


def test_a_cut_gzip_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    row = '{"ts": 1, "input_length": 5, "output_length": 5, "parent": -1, "shared": 0}\n'
    path.write_bytes(gzip.compress(row.encode() * 500)[:-20])
    section = load_scenario(PAPER).workload.model_copy(update={"kind": "agent-trace", "path": str(path)})
    with pytest.raises(ConfigurationError, match=r"cannot read trace .*cut\.jsonl\.gz"):
        load_workload(load_scenario(PAPER).model_copy(update={"workload": section}))


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("agent-trace", "", "is empty"),
        ("agent-trace", '{"ts": 1, "input_length": 5, "outp', "line 1: expected one JSON object"),
        (
            "agent-trace",
            '{"ts": 1, "input_length": 5, "parent": -1, "shared": 0}',
            "line 1: key 'output_length' is missing",
        ),
        (
            "agent-trace",
            "\n".join(
                f'{{"ts": {at}, "input_length": 5, "output_length": 5, "parent": -1, "shared": 0}}'
                for at in (2, 1)
            ),
            "expected sorted times",
        ),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1}', "key 'hash_ids' is missing"),
        ("azure", "when,in,out\n", "line 1: expected the header"),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48",
            "line 2: expected",
        ),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path: Path, kind: str, text: str, expected: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    scenario = load_scenario(PAPER)
    section = scenario.workload.model_copy(
        update={"kind": kind, "path": str(path), "rate_per_s": None, "requests": None}
    )
    with pytest.raises(ConfigurationError) as caught:
        load_workload(scenario.model_copy(update={"workload": section}))
    assert expected in str(caught.value)
    assert "trace" in str(caught.value)
