"""The demo's configuration, script and report."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdd.cli.demo import report, script
from pdd.cli.demo.settings import DemoModel, DemoSettings, demo_config, own_model
from pdd.config.load import load_config

SETTINGS = DemoSettings(
    model="demo", rate="100mbit", delay="20ms", handoff="catch-up", pipeline="p-rld-md", port=24110
)


@pytest.mark.parametrize("max_model_len", [4096, None])
def test_the_configuration_is_valid_and_leads_site_a_through_the_line(
    tmp_path: Path, max_model_len: int | None
) -> None:
    model = DemoModel(path='/models/a "b"', name="m", dtype="float32", max_model_len=max_model_len)
    path = tmp_path / "pdd.toml"
    path.write_text(demo_config(SETTINGS, model, run_dir=tmp_path))
    config = load_config(path, environ={})
    assert [engine.role for engine in config.engines] == ["prefill", "relay", "main"]
    assert (config.model.path, config.model.max_model_len) == ('/models/a "b"', max_model_len)
    assert (config.router.handoff, config.router.pipeline) == ("catch-up", "p-rld-md")
    [link] = config.links
    assert (link.rate, link.delay) == (12.5e6, 0.02)
    assert config.policy.assumed_wan_rtt_s == pytest.approx(0.04)
    main = config.engine("md0")
    assert main.url == f"http://{link.forwards[0].listen}"
    assert link.forwards[0].target == f"127.0.0.1:{main.port}"
    assert main.advertise == link.forwards[1].listen
    assert link.forwards[1].target == f"127.0.0.1:{main.data_port}"
    assert main.control_url == f"http://{link.forwards[2].listen}"
    assert link.forwards[2].target == f"127.0.0.1:{main.control_port}"
    ports = [
        port for engine in config.engines for port in (engine.port, engine.data_port, engine.control_port)
    ]
    assert len(set(ports)) == 9


def test_a_folder_is_a_model_and_so_is_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert (own_model(str(folder)).path, own_model(str(folder)).name) == (str(folder), "my-model")
    assert (own_model("org/name").path, own_model("org/name").name) == ("org/name", "org/name")


def test_the_history_grows_by_answer_and_question() -> None:
    conversation = script.Conversation()
    before = list(conversation.messages)
    conversation.answered("an answer", "a question")
    conversation.answered("another", None)
    assert conversation.messages[: len(before)] == before
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert 900 < len(script.report().split()) < 1300


def record(**values: Any) -> dict[str, Any]:
    return {
        "id": "demo-1",
        "pipeline": "p-rld-md",
        "reason": "wan_beyond_slo",
        "outcome": "complete",
        "second_token_s": 1.5,
        "wan_landed_s": 3.0,
        "prompt_tokens": 1468,
        "output_tokens": 56,
        "ttft_s": 12.6,
        "eager_tokens": 17,
        "handoff_mode": "catch-up",
        "handoff_rounds": 3,
        "wan_bytes": 10_000_000,
        "wan_bytes_without_drc": 40_000_000,
        "unknown_to_the_demo": 1,
        **values,
    }


def results() -> list[report.Result]:
    return [
        report.Result(label="turn 1", error=None, record=record(), equal_to_reference=True),
        report.Result(label="turn 2", error=None, record=record(pipeline="p-md"), equal_to_reference=None),
        report.Result(label="turn 3", error="HTTP 503", record={}, equal_to_reference=None),
    ]


def test_a_result_is_good_only_if_everything_says_so() -> None:
    def good(**values: Any) -> bool:
        given = {"label": "x", "error": None, "record": record(), "equal_to_reference": None, **values}
        return report.Result(**given).ended_well

    assert good()
    assert not good(error="HTTP 500")
    assert not good(record=record(outcome="error"))
    assert not good(record={})
    assert not good(equal_to_reference=False)


def test_the_summary_counts() -> None:
    values = report.summary(results(), elapsed_s=12.0)
    assert (values["num_requests"], values["num_ended_well"], values["num_relayed"]) == (3, 2, 1)
    assert values["num_second_token_before_landed"] == 2
    assert values["wan_bytes_ratio"] == 0.25
    assert values["equal_to_reference"] is True
    assert report.summary_line(values) == (
        "2 of 3 requests ended well, 1 of them relayed; 20.0 MB crossed the WAN, 80.0 MB would have "
        "without the decode-side cache; answers are equal to those of a plain engine."
    )


def test_a_handoff_is_measured_against_the_usual_gap() -> None:
    handed_over = record(stall_s=0.2, median_itl_s=0.07)
    asked = [
        report.Result(label="turn 1", error=None, record=handed_over, equal_to_reference=None),
        report.Result(label="turn 2", error=None, record=record(median_itl_s=0.07), equal_to_reference=None),
    ]
    (line,) = report.handoff_lines(asked, rtt_s=0.03)
    assert line == (
        "turn 1: at the handoff (catch-up 3) the client waited 0.200 s for a token, 0.070 s otherwise "
        "(median); twice that and a round trip are 0.170 s"
    )


def test_the_json_has_exactly_the_promised_fields(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report.write_json(path, results(), report.summary(results(), elapsed_s=1.0))
    written = json.loads(path.read_text())
    assert [list(entry) for entry in written["requests"]] == [list(report.JSON_FIELDS)] * 3
    assert written["requests"][0]["equal_to_reference"] is True
    assert written["summary"]["num_requests"] == 3


def shown(*, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report.table(results(), width=width))
    return console.export_text()


def test_the_table_shows_both_times_and_failures() -> None:
    wide, narrow = shown(width=report.WIDE), shown(width=80)
    for text in (wide, narrow):
        assert "second" in text
        assert "landed" in text
        assert "1.50" in text
        assert "3.00" in text
        assert "failed" in text
        assert "…" not in text
    assert "HTTP 503" in wide
