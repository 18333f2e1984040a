"""``pdd doctor`` against running agents."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.kit.agent_fleet import AgentProcess, free_port, wait_for
from tests.kit.certificates import Pki

from pdd.cli.doctor.facts import probe_events
from pdd.cli.main import main
from pdd.config.load import KvEventAddresses


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


def addresses(publish: str, replay: str) -> KvEventAddresses:
    return KvEventAddresses(publish="", publish_replay="", follow=publish, follow_replay=replay)


async def test_kv_events_are_heard_of_where_they_are_published_and_only_there(tmp_path: Path) -> None:
    async def answer_otherwise(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    other = await asyncio.start_server(answer_otherwise, "127.0.0.1", 0)
    near = f"ipc://{tmp_path}/p0.kv"
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher, context.socket(zmq.ROUTER) as replay:
        publisher.bind(near)
        far = f"tcp://127.0.0.1:{replay.bind_to_random_port('tcp://127.0.0.1')}"
        closed = f"tcp://127.0.0.1:{free_port()}"
        async with other:
            http = f"tcp://127.0.0.1:{other.sockets[0].getsockname()[1]}"
            assert await probe_events(addresses(near, far)) == (None, None)
            problem, _ = await probe_events(addresses(closed, http))
    assert problem is not None
    refused, not_zeromq = problem.split("; ")
    assert refused.startswith(f"{closed}: ")
    assert not_zeromq == f"{http} answers, but not as ZeroMQ: is engines[].events_port right?"
    unknown = f"{tmp_path}/none.kv is not on this host"
    assert await probe_events(addresses(f"ipc://{tmp_path}/none.kv", near)) == (None, unknown)
