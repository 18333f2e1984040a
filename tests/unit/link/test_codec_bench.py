"""``pdd bench codec``: what it prints; the figures themselves are not judged."""

import json
from pathlib import Path

import pytest
from tests.kit.bf16 import kv_like

from pdd.cli.main import main
from pdd.core.errors import EXIT_CONFIGURATION


def test_a_file_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kv.bf16"
    file.write_bytes(kv_like(2**17, seed=0).tobytes() + b"x")
    assert main(["bench", "codec", "--rounds", "1", "--file", str(file)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["source"] == str(file)
    assert figures["bytes"] == 2**18 + 1
    assert 1.2 < figures["ratio"] < 2
    assert figures["encode_cpu_s_per_gb"] > 0
    assert figures["decode_cpu_s_per_gb"] > 0


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--file", str(tmp_path / "none")]) == EXIT_CONFIGURATION
    assert "none" in capsys.readouterr().err
