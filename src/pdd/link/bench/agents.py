"""Two agents at the two sides of a place, and transfers between them."""

import contextlib
import datetime
import http.client
import json
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pdd.core.errors import ConnectError, DeadlineError, PddError
from pdd.link.bench.engine import WAIT_S, BenchEngine
from pdd.link.bench.place import SIDES, Place
from pdd.transport.issue import issue_ca, issue_certificate, write_key_pair

SENDER, RECEIVER = "p0", "md0"
_IDS: Final = dict(zip(SIDES, (SENDER, RECEIVER), strict=True))
_STOP_S: Final = 10.0
_CERTIFICATE_LIFE: Final = datetime.timedelta(days=1)


class AgentPair:
    """``p0`` at side a pushes to ``md0`` at side b; usable as a context.

    Args:
        place: Where they are.
        chunk_bytes: Size of a chunk.
        store_bytes: Store of each agent.
        streams: Data streams; None leaves the default.
        is_encrypted: Whether they speak TLS, with certificates made for them.
    """

    def __init__(
        self,
        place: Place,
        *,
        chunk_bytes: int,
        store_bytes: int,
        streams: int | None = None,
        is_encrypted: bool = False,
    ) -> None:
        self._place = place
        self._is_encrypted = is_encrypted
        self._stack = contextlib.ExitStack()
        try:
            self._start(chunk_bytes, store_bytes, streams)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, chunk_bytes: int, store_bytes: int, streams: int | None) -> None:
        run_dir = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pdd-bench-")))
        self._log = run_dir / "agents.log"
        self._control_ports = {side: self._place.free_port(side) for side in SIDES}
        config = run_dir / "pdd.toml"
        config.write_text(self._config(run_dir, store_bytes, streams))
        self.processes = {side: self._start_agent(side, config) for side in SIDES}
        self._engines = {}
        for side in SIDES:
            engine = BenchEngine(run_dir / f"{_IDS[side]}.sock", _IDS[side], chunk_bytes=chunk_bytes)
            self._stack.callback(engine.close)
            self._engines[side] = engine
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._landed_s: dict[str, float] = {}
        self._follow_events()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Both agents are gone, and their files."""
        self._stack.close()

    def prepare(self, name: str, num_chunks: int) -> list[bytes]:
        """New chunks are in the sender's store."""
        return self._engines["a"].prepare(name, num_chunks)

    def transfer(self, orders: Mapping[str, Sequence[bytes]]) -> dict[str, float]:
        """All have landed; seconds from the first order to each landing, as the sender's router hears it.

        Args:
            orders: Keys by the name of the transfer, which must be new.

        Raises:
            PddError: If one of them fails.
        """
        start_s = self.order(orders)
        self.wait_landed(orders)
        self._release(orders)
        return {name: self._landed_s[name] - start_s for name in orders}

    def order(self, orders: Mapping[str, Sequence[bytes]]) -> float:
        """The transfers have been ordered; returns when, on the monotonic clock."""
        start_s = time.monotonic()
        for name, keys in orders.items():
            self._engines["a"].order(name, RECEIVER, keys)
        return start_s

    def has_landed(self, orders: Mapping[str, Sequence[bytes]]) -> bool:
        """Whether all of them have landed."""
        return all(name in self._landed_s for name in orders)

    def wait_landed(self, orders: Mapping[str, Sequence[bytes]]) -> None:
        """All of them have landed.

        Raises:
            PddError: If one of them fails.
        """
        while not self.has_landed(orders):
            try:
                event = self._events.get(timeout=WAIT_S)
            except queue.Empty:
                raise DeadlineError(f"nothing landed for {WAIT_S:g} s; {self._tail()}") from None
            if event["event"] == "failed":
                raise PddError(f"transfer {event['transfer']} failed: {event['reason']} {event['detail']}")
            if event["event"] == "landed":
                self._landed_s[event["transfer"]] = event["at_s"]

    def request(self, side: str, method: str, path: str, *, origin: str = "a") -> dict[str, Any]:
        """What an agent's control API answers to a request from side ``origin``."""
        connection = self._connect(side, origin)
        with contextlib.closing(connection):
            connection.request(method, path, body=b"" if method == "POST" else None)
            answer: dict[str, Any] = json.load(connection.getresponse())
            return answer

    def _release(self, orders: Mapping[str, Sequence[bytes]]) -> None:
        """No lease is left, so that the next round has the whole store. Asked for on the spot: no traffic."""
        for name in orders:
            self.request("b", "POST", f"/v1/transfers/{name}/release", origin="b")

    def _config(self, run_dir: Path, store_bytes: int, streams: int | None) -> str:
        rows = [f'run_dir = "{run_dir}"', "[model]", 'path = "none"', 'name = "none"', "[agent]"]
        rows += [f"streams = {streams}"] if streams else []
        # Compared with plain sockets, so in clear by default; what TLS costs is a figure of its own.
        rows += _tls_rows(run_dir) if self._is_encrypted else ["[tls]", 'mode = "off"']
        for side in SIDES:
            rows += [
                "[[engines]]",
                f'id = "{_IDS[side]}"',
                f'role = "{"prefill" if side == "a" else "main"}"',
                f'site = "{side}"',
                f'host = "{self._place.host(side)}"',
                "port = 1",
                f"data_port = {self._place.free_port(side)}",
                f"control_port = {self._control_ports[side]}",
                f'store_bytes = "{store_bytes}b"',
            ]
        return "\n".join(rows) + "\n"

    def _start_agent(self, side: str, config: Path) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "pdd.cli", "--log-level", "warning", "agent"]
        argv += ["--config", str(config), "--engine", _IDS[side]]
        with open(self._log, "ab") as log:
            process = subprocess.Popen(self._place.command(side, argv), stdout=log, stderr=log)
        self._stack.callback(_stop, process)
        return process

    def _connect(self, side: str, origin: str) -> http.client.HTTPConnection:
        deadline_s = time.monotonic() + WAIT_S
        where = (self._place.host(side), self._control_ports[side])
        while True:
            sock = self._place.make_socket(origin)
            try:
                sock.settimeout(WAIT_S)
                sock.connect(where)
            except OSError as error:
                sock.close()
                if time.monotonic() > deadline_s:
                    raise ConnectError(f"no agent at side {side}; {self._tail()}") from error
                time.sleep(0.02)
                continue
            connection = http.client.HTTPConnection(*where)
            connection.sock = sock
            return connection

    def _follow_events(self) -> None:
        connection = self._connect("a", "a")
        connection.request("GET", "/v1/events?after=0")
        response = connection.getresponse()

        def read() -> None:
            with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
                while row := response.readline():
                    self._events.put({**json.loads(row), "at_s": time.monotonic()})

        thread = threading.Thread(target=read, name="pdd-bench-events", daemon=True)
        thread.start()

        def stop() -> None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT_S)
            connection.close()

        self._stack.callback(stop)

    def _tail(self) -> str:
        rows = self._log.read_text(errors="replace").splitlines()[-5:]
        return "the agents said: " + " | ".join(rows)


def _tls_rows(folder: Path) -> list[str]:
    """TLS for all, with a CA and certificates of this run."""
    now = datetime.datetime.now(datetime.UTC)
    life = {"not_before": now - _CERTIFICATE_LIFE, "not_after": now + _CERTIFICATE_LIFE}
    ca = issue_ca(**life)
    write_key_pair(ca, folder / "ca.crt", folder / "ca.key")
    for engine_id in _IDS.values():
        pair = issue_certificate(ca, [engine_id], **life)
        write_key_pair(pair, folder / f"{engine_id}.crt", folder / f"{engine_id}.key")
    names = {"cert": "{engine}.crt", "key": "{engine}.key", "ca": "ca.crt"}
    return ["[tls]", 'mode = "on"', *(f'{key} = "{folder / name}"' for key, name in names.items())]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
