"""``pdd doctor`` against running agents."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.kit.agent_fleet import AgentProcess, free_port, wait_for
from tests.kit.certificates import Pki

from pdd.cli.main import main


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def engine_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), _Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def write_config(folder: Path, engine_port: int, *, tls: str) -> Path:
    lines = ["[model]", 'path = "m"', 'name = "m"', "[tls]", f'mode = "{tls}"']
    lines[:0] = [f'run_dir = "{folder}"']
    for engine_id, role in (("p0", "prefill"), ("md0", "main")):
        lines += ["[[engines]]", f'id = "{engine_id}"', f'role = "{role}"', 'store_bytes = "16MiB"']
        lines += [f"port = {free_port()}", f'url = "http://127.0.0.1:{engine_port}"']
        lines += [f"data_port = {free_port()}", f"control_port = {free_port()}"]
    path = folder / "pdd.toml"
    path.write_text("\n".join(lines))
    return path


def diagnose(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["doctor", "--config", str(path), "--json"])
    return status, json.loads(capsys.readouterr().out)


def failed(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(f["check"], f["subject"]) for f in report["findings"] if f["verdict"] == "fail"}


@pytest.mark.parametrize("tls", ["off", "on"])
def test_a_fleet_from_nothing_to_whole_and_back(
    tmp_path: Path, engine_port: int, tls: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from pdd.config.load import load_config

    if tls == "on":
        pki = Pki(tmp_path / "certs")
        pki.files("p0")
        pki.files("md0")
    path = write_config(tmp_path, engine_port, tls=tls)
    status, report = diagnose(path, capsys)
    assert status == 1
    assert failed(report) == {(check, e) for check in ("agent", "data port") for e in ("p0", "md0")}
    config = load_config(path, environ={})
    agents = [AgentProcess(config, engine_id) for engine_id in ("p0", "md0")]
    engines: list[Any] = []
    try:
        engines = [agents[1].engine(), agents[0].engine()]
        wait_for(lambda: diagnose(path, capsys)[0] == 0, "a whole fleet")
        engines.pop(0).close()
        engines.append(agents[1].engine(dtype="other"))
        status, report = wait_for(lambda: _found(path, capsys, "chunks"), "the other dtype")
        assert "dtype: test != other" in json.dumps(report)
        assert main(["doctor", "--config", str(path)]) == 1
        table = capsys.readouterr().out
        assert "dtype: test != other" in table
    finally:
        for engine in engines:
            engine.close()
        for agent in agents:
            agent.stop()


def _found(path: Path, capsys: pytest.CaptureFixture[str], check: str) -> tuple[int, dict[str, Any]] | None:
    status, report = diagnose(path, capsys)
    return (status, report) if check in {name for name, _ in failed(report)} else None


def test_a_broken_configuration_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pdd.toml"
    path.write_text("[modell]\n")
    status, report = diagnose(path, capsys)
    assert status == 1
    assert "modell: unknown key" in report["findings"][0]["detail"]
