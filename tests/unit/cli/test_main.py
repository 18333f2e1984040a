"""The command line: what it refuses, how it says so, and what it prints."""

import shlex
from pathlib import Path

import pytest

from pdd import __version__
from pdd.cli.main import main
from pdd.core.errors import EXIT_CONFIGURATION

CONFIG = """
run_dir = "/tmp/pdd-unit"
[model]
path = "org/model"
name = "m"
[[engines]]
id = "p0"
role = "prefill"
port = 24101
data_port = 24102
control_port = 24103
[[engines]]
id = "md0"
role = "main"
site = "b"
port = 24104
data_port = 24105
control_port = 24106
[engines.env]
VLLM_TARGET_DEVICE = "cpu"
[[engines]]
id = "md1"
role = "main"
site = "b"
port = 24107
data_port = 24108
control_port = 24109
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "pdd.toml"
    path.write_text(CONFIG)
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pdd {__version__}\n"


@pytest.mark.parametrize("command", ["demo", "serve", "agent", "router", "link", "model"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: pdd {command}" in capsys.readouterr().out


def test_print_shows_both_programs_with_their_environment(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "main", "--config", str(config), "--engine", "md0", "--print"]) == 0
    comment, agent, engine = capsys.readouterr().out.splitlines()
    assert comment.startswith("#")
    assert shlex.split(agent)[-5:] == ["agent", "--config", str(config), "--engine", "md0"]
    words = shlex.split(engine)
    command = words[words.index("vllm") :]
    assert command[:3] == ["vllm", "serve", "org/model"]
    assert command[command.index("--port") + 1] == "24104"
    assert "VLLM_TARGET_DEVICE=cpu" in words[: words.index("vllm")]
    assert "PYTHONHASHSEED=0" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["serve", "main", "--config", "{config}"],
            "more than one engine of role main; choose one with --engine",
        ),
        (["serve", "relay", "--config", "{config}"], "no engine of role relay"),
        (["serve", "main", "--config", "{config}", "--engine", "p0"], "no engine 'p0' of role main"),
        (["agent", "--config", "{config}", "--engine", "x"], "p0 (prefill), md0 (main), md1 (main)"),
        (["router", "--config", "/no/such.toml"], "cannot read /no/such.toml: No such file"),
        (["link", "--config", "{config}"], "has no [[links]]"),
        (["link"], "needs --config"),
        (["link", "set", "--rate", "1mbit"], "needs --control"),
        (["link", "set", "--control", "127.0.0.1:1"], "needs --rate, --delay or another setting"),
        (["link", "packets", "--rate", "1mbit"], "needs --rate and --delay"),
        (["link", "packets", "--rate", "1mbit", "--delay", "1ms", "--jitter", "2ms"], "jitter"),
        (["link", "enter", "a", "true"], "needs --control"),
        (["link", "hold", "a"], "takes no 'a'"),
    ],
)
def test_what_a_person_has_to_fix_is_one_message_and_status_2(
    arguments: list[str], words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([text.format(config=config) for text in arguments]) == EXIT_CONFIGURATION
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("pdd: ")
    assert "Traceback" not in error


def test_a_broken_config_names_file_key_and_expectation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pdd.toml"
    path.write_text(CONFIG.replace("port = 24101", 'port = "many"') + "\n[router]\nprot = 1\n")
    assert main(["router", "--config", str(path)]) == EXIT_CONFIGURATION
    error = capsys.readouterr().err
    assert str(path) in error
    assert "engines[0].port: Input should be a valid integer" in error
    assert "router.prot: unknown key" in error


def test_a_quantity_is_checked_when_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--rate", "quick"])
    assert caught.value.code == 2
    assert "'quick' is not a rate" in capsys.readouterr().err


def test_no_emulator_is_a_failure_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["link", "state", "--control", "127.0.0.1:9"]) == 1
    assert "no link emulator answers at 127.0.0.1:9" in capsys.readouterr().err
