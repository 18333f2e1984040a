"""Agents for tests: in this process, on free ports, with what a test waits for."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.kit.engine_side import FakeEngine

from pdd.agent.agent import Agent
from pdd.config.load import agent_socket
from pdd.config.schema import AgentConfig, EngineConfig, ModelConfig, PddConfig, TlsConfig
from pdd.launch.ports import free_ports
from pdd.transport.base import Transport
from pdd.transport.choice import choose_transport

WAIT_S = 120.0
"""Includes the start of a process on a busy machine."""
T = TypeVar("T")


def free_port() -> int:
    """A port that stays free until something listens there."""
    return free_ports(1)[0]


def make_config(
    run_dir: Path,
    ids: tuple[str, ...] = ("p0", "md0"),
    *,
    store_bytes: int = 16 * 2**20,
    stores: dict[str, int] | None = None,
    advertise: dict[str, str] | None = None,
    host: str = "127.0.0.1",
    sites: dict[str, str] | None = None,
    certs: Path | None = None,
    **agent: Any,
) -> PddConfig:
    """Engines called ``ids`` on this host, the first one for prefill."""
    engines = tuple(
        EngineConfig(
            id=engine_id,
            role="prefill" if i == 0 else "main",
            host=host,
            site=(sites or {}).get(engine_id, "a"),
            port=1,
            data_port=free_port(),
            control_port=free_port(),
            store_bytes=(stores or {}).get(engine_id, store_bytes),
            advertise=(advertise or {}).get(engine_id),
        )
        for i, engine_id in enumerate(ids)
    )
    settings = {"streams": 2, "connect_timeout_s": 5.0, **agent}
    return PddConfig(
        run_dir=str(run_dir),
        model=ModelConfig(path="none", name="none"),
        agent=AgentConfig(**settings),
        engines=engines,
        tls=tls_config(certs),
    )


def tls_config(certs: Path | None) -> TlsConfig:
    """TLS for all with the certificates of a folder, or for none."""
    if certs is None:
        return TlsConfig()
    return TlsConfig(
        mode="on",
        cert=str(certs / "{engine}.crt"),
        key=str(certs / "{engine}.key"),
        ca=str(certs / "ca.crt"),
    )


class RunningAgent:
    """An agent of this process whose clock is the test's: ``tick`` runs on a thread, fast."""

    def __init__(
        self, config: PddConfig, engine_id: str, *, transport: Transport | None = None, **options: Any
    ) -> None:
        self.config = config
        self.engine_id = engine_id
        self.agent = Agent(
            config, engine_id, transport=transport or choose_transport(config, engine_id), **options
        )
        self._stopped = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self.agent.start()
        self._ticker.start()
        self.engines: list[FakeEngine] = []

    @property
    def socket(self) -> Path:
        return agent_socket(self.config, self.engine_id)

    def engine(self, **options: Any) -> FakeEngine:
        engine = FakeEngine(self.socket, self.engine_id, **options)
        self.engines.append(engine)
        return engine

    def wait_connected(self) -> None:
        """All connections of one peer stand here: its control connection and its streams."""
        agent, num = self.agent, 1 + self.config.agent.streams
        wait_for(lambda: agent._num_connections == num and not agent._strangers, "the peer's connections")

    def give_up_after(self, stall_timeout_s: float, *, peer: str = "md0") -> None:
        """The link to the peer has this stall timeout from now on.

        For a test of what fails: with so short a one from the start, a busy machine fails before it says why.
        """
        assert self.agent.space is not None
        link = self.agent.space.links[peer]
        link.settings = link.settings.model_copy(update={"stall_timeout_s": stall_timeout_s})

    def wait_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The first event of that kind with those fields, ever."""

        def find() -> dict[str, Any] | None:
            for event in self.agent.events.after(0):
                if event["event"] == kind and all(event.get(k) == v for k, v in fields.items()):
                    return event
            return None

        return wait_for(find, f"event {kind} {fields} in {self.agent.events.after(0)[-8:]}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.agent.events.after(0) if event["event"] == kind]

    def stop(self) -> None:
        self._stopped.set()
        for engine in self.engines:
            engine.close()
        self.agent.stop()
        self._ticker.join()

    def _tick(self) -> None:
        while not self._stopped.wait(0.05):
            self.agent.tick()


def wait_for(is_true: Callable[[], T | None], what: str = "the condition", *, timeout_s: float = WAIT_S) -> T:
    """The first true value; polls, since what is waited for is in other threads or processes."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = is_true()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s in vain for {what}"
        time.sleep(0.005)


class AgentProcess:
    """``run_agent`` in a process of its own."""

    def __init__(
        self, config: PddConfig, engine_id: str, *, log: Path | None = None, path: Path | None = None
    ) -> None:
        self.config = config
        self.engine_id = engine_id
        code = (
            "import sys, logging; from pathlib import Path; from pdd.agent.main import run_agent;"
            "from pdd.config.schema import PddConfig;"
            "logging.basicConfig(level=logging.INFO);"
            "path = Path(sys.argv[3]) if sys.argv[3:] else None;"
            "sys.exit(run_agent(PddConfig.model_validate_json(sys.argv[1]), sys.argv[2], path=path))"
        )
        self._log_path = log
        self._log = open(log or os.devnull, "ab")  # noqa: SIM115  # closed by stop
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, config.model_dump_json(), engine_id, *([str(path)] if path else [])],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": "src"},
        )

    def log_text(self) -> str:
        return self._log_path.read_text() if self._log_path else ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def socket(self) -> Path:
        return agent_socket(self.config, self.engine_id)

    @property
    def control_url(self) -> str:
        return self.config.engine(self.engine_id).control_url

    def engine(self, **options: Any) -> FakeEngine:
        return FakeEngine(self.socket, self.engine_id, **options)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._log.close()


class EventReader:
    """Follows an agent's event stream over HTTP in a thread."""

    def __init__(self, control_url: str) -> None:
        import http.client
        import json
        import urllib.parse

        where = urllib.parse.urlsplit(control_url)
        assert where.hostname is not None
        assert where.port is not None
        deadline_s = time.monotonic() + WAIT_S
        while True:
            self._connection = http.client.HTTPConnection(where.hostname, where.port, timeout=WAIT_S)
            try:
                self._connection.request("GET", "/v1/events?after=0")
                break
            except OSError:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
        response = self._connection.getresponse()
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()

        def read() -> None:
            try:
                while line := response.readline():
                    self._events.put(json.loads(line))
            except (OSError, ValueError, AttributeError, http.client.HTTPException):
                pass

        self._thread = threading.Thread(target=read, daemon=True)
        self._thread.start()

    def wait(self, kind: str, **fields: Any) -> dict[str, Any]:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            event = self._events.get(timeout=max(0.01, deadline_s - time.monotonic()))
            if event["event"] == kind and all(event.get(k) == v for k, v in fields.items()):
                return event

    def close(self) -> None:
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._connection.close()
