"""Readiness, failures, ports and restarts, with small fake programs."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdd.core.errors import ConfigurationError, LaunchError
from pdd.launch import supervisor as supervisor_module
from pdd.launch.ports import free_ports
from pdd.launch.program import PortUse, Program, check_ports
from pdd.launch.serve import serve
from pdd.launch.supervisor import MAX_FAILURES, Progress, Supervisor

FAKE = Path(__file__).with_name("fake_program.py")


class Watched:
    """A supervisor and all it told."""

    def __init__(self, supervisor: Supervisor, told: list[Progress]) -> None:
        self.supervisor = supervisor
        self.told = told

    def states(self, name: str) -> list[str]:
        return [progress.state for progress in self.told if progress.name == name]

    async def until(self, name: str, state: str, *, times: int = 1) -> None:
        async with asyncio.timeout(120):
            while self.states(name).count(state) < times:  # noqa: ASYNC110  # told by a callback
                await asyncio.sleep(0.02)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    told: list[Progress] = []
    async with Supervisor(log_dir=tmp_path / "logs", on_progress=told.append) as supervisor:
        yield Watched(supervisor, told)


def fake(tmp_path: Path, name: str, *flags: str) -> Program:
    (port,) = free_ports(1)
    file = tmp_path / f"{name}.mmap"
    return Program(
        name=name,
        argv=(sys.executable, str(FAKE), str(port), "--file", str(file), *flags),
        ready_url=f"http://127.0.0.1:{port}/health",
        ready_timeout_s=120,
        ports=(PortUse(host="127.0.0.1", port=port, key=f"engines[0].port, {name}"),),
        files=(file,),
    )


async def test_a_program_is_ready_when_its_url_answers(watched: Watched, tmp_path: Path) -> None:
    child = await watched.supervisor.start(fake(tmp_path, "one"))
    assert watched.states("one") == ["starting", "ready"]
    assert child.status is None
    assert child.last_lines()[-1] == "line 39"


async def test_a_program_that_dies_early_is_quoted(watched: Watched, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        await watched.supervisor.start(fake(tmp_path, "one", "--never-ready", "--die-after", "0.3"))
    assert "one ended with status 3 before it was ready" in str(caught.value)
    assert str(tmp_path / "logs" / "one.log") in str(caught.value)
    assert len(caught.value.log_lines) == 30
    assert caught.value.log_lines[-1] == "boom: out of tokens"
    assert not (tmp_path / "one.mmap").exists()


async def test_the_reason_of_a_refused_engine_is_said_first(watched: Watched, tmp_path: Path) -> None:
    buried = "(Worker pid=7) ERROR pdd.core.errors.UnsupportedModelError: model m: serve another"
    script = f"print({buried!r}); [print('traceback line', i) for i in range(50)]; raise SystemExit(1)"
    program = Program(name="engine", argv=(sys.executable, "-c", script), ready_url="http://127.0.0.1:1/")
    with pytest.raises(LaunchError, match=r"^engine ended .*ready: model m: serve another; its last"):
        await watched.supervisor.start(program)


async def test_a_program_that_is_never_ready_is_stopped(watched: Watched, tmp_path: Path) -> None:
    program = fake(tmp_path, "one", "--never-ready")
    slow = Program(**{**{f: getattr(program, f) for f in program.__slots__}, "ready_timeout_s": 0.8})
    with pytest.raises(LaunchError, match="one was not ready after 1 s"):
        await watched.supervisor.start(slow)
    assert not (tmp_path / "one.mmap").exists()


async def test_a_program_that_does_not_exist_is_named(watched: Watched) -> None:
    with pytest.raises(LaunchError, match=r"ghost cannot be started: /no/such/program: No such file"):
        await watched.supervisor.start(Program(name="ghost", argv=("/no/such/program",)))


async def test_a_port_in_use_is_named_before_anything_starts(watched: Watched, tmp_path: Path) -> None:
    program = fake(tmp_path, "one")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", program.ports[0].port))
        taken.listen()
        words = rf"port {program.ports[0].port} \(engines\[0\].port, one\) on 127.0.0.1 is in use"
        with pytest.raises(ConfigurationError, match=words):
            await watched.supervisor.start(program)
    assert watched.states("one") == []


def test_a_port_asked_for_twice_is_named() -> None:
    first, second = (
        Program(name=key, argv=("x",), ports=(PortUse(host="127.0.0.1", port=24001, key=key),))
        for key in ("router.port", "engines[0].port")
    )
    with pytest.raises(
        ConfigurationError, match=r"24001 is asked for twice, by router.port and by engines\[0\].port"
    ):
        check_ports([first, second])


async def test_a_program_that_ends_while_others_are_awaited_is_quoted(
    watched: Watched, tmp_path: Path
) -> None:
    async def boot() -> None:
        last_hour = tmp_path / "last-hour"
        await watched.supervisor.start(fake(tmp_path, "agent", "--die-at", str(last_hour)))
        last_hour.touch()  # it was ready, so that this is an end, and none before it was ready
        await watched.supervisor.start(fake(tmp_path, "engine", "--never-ready"))

    with pytest.raises(LaunchError, match=r"agent ended with status 3;(?s:.)*boom: out of tokens"):
        await watched.supervisor.watch(boot())


async def test_work_under_watch_gives_its_result(watched: Watched, tmp_path: Path) -> None:
    await watched.supervisor.start(fake(tmp_path, "agent"))
    assert await watched.supervisor.watch(asyncio.sleep(0.01, "done")) == "done"


async def test_a_program_that_does_its_work_and_ends_gives_its_last_lines(watched: Watched) -> None:
    program = Program(name="model", argv=(sys.executable, "-c", "print('a'); print('/folder')"), ends=True)
    assert await watched.supervisor.run(program) == ["a", "/folder"]
    failing = Program(name="model", argv=(sys.executable, "-c", "raise SystemExit('no disk')"), ends=True)
    with pytest.raises(LaunchError, match=r"model ended with status 1;(?s:.)*no disk"):
        await watched.supervisor.run(failing)


async def test_the_engine_comes_back_and_its_agent_stays(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.05)
    agent, engine = fake(tmp_path, "agent"), fake(tmp_path, "engine")
    task = asyncio.create_task(serve(watched.supervisor, agent, engine))
    await watched.until("engine", "ready")
    running = watched.supervisor.running("engine")
    assert running is not None
    running.signal(signal.SIGKILL)
    await watched.until("engine", "ready", times=2)  # with its file from before removed, else it would refuse
    assert watched.states("agent") == ["starting", "ready"]

    running = watched.supervisor.running("agent")
    assert running is not None
    running.signal(signal.SIGKILL)
    await watched.until("agent", "ready", times=2)
    assert watched.states("engine").count("ready") == 2
    restart = next(progress for progress in watched.told if progress.state == "restarting")
    assert restart.detail.startswith("was killed by SIGKILL")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_engine_that_never_becomes_ready_is_given_up(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.05)
    engine = fake(tmp_path, "engine", "--never-ready", "--die-after", "0.05")
    with pytest.raises(LaunchError, match="boom: out of tokens"):
        await serve(watched.supervisor, fake(tmp_path, "agent"), engine)
    assert watched.states("engine").count("starting") == MAX_FAILURES


REFUSES = "import sys; print('pdd: pdd.toml: model.name: not this one', file=sys.stderr); sys.exit(2)"


async def test_a_program_that_refuses_its_configuration_is_not_started_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.05)
    refuses = Program(name="parser", argv=(sys.executable, "-c", REFUSES))
    words = r"parser ended with status 2( before it was ready)?: pdd.toml: model.name: not this one; its last"
    with pytest.raises(ConfigurationError, match=words):
        await watched.supervisor.keep(refuses)
    with pytest.raises(ConfigurationError, match=words):
        await watched.supervisor.start(replace(refuses, ready_url="http://127.0.0.1:1/"))
    assert watched.states("parser").count("starting") == 2


COUNTS = (
    "import pathlib, sys, time; runs = pathlib.Path(sys.argv[1]); "
    "n = len(runs.read_text()) if runs.exists() else 0; "
    "runs.write_text('x' * (n + 1)); time.sleep(600 if n == 2 else 0.3); sys.exit(2 * n)"
)
"""Ends well, then refuses its configuration, then runs."""


async def test_a_program_that_has_run_well_is_started_again_though_it_refuses_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(supervisor_module, "HEALTHY_S", 0.1)
    runs = tmp_path / "runs"
    program = Program(name="parser", argv=(sys.executable, "-c", COUNTS, str(runs)))
    keeping = asyncio.create_task(watched.supervisor.keep(program))
    async with asyncio.timeout(60):
        while not runs.exists() or runs.read_text() != "xxx":
            assert not keeping.done()
            await asyncio.sleep(0.05)
    keeping.cancel()


async def test_a_log_that_somebody_removed_ends_no_supervision(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.05)
    program = Program(name="one", argv=(sys.executable, "-c", "import time; time.sleep(0.3)"))
    child = await watched.supervisor.start(program)
    child.log_path.unlink()
    keeping = asyncio.create_task(watched.supervisor.keep(program, child))
    async with asyncio.timeout(60):
        while watched.states("one").count("starting") < 2:
            assert not keeping.done()
            await asyncio.sleep(0.05)
    keeping.cancel()


async def test_a_program_is_ready_when_its_socket_takes_connections(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    listens = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); "
        "time.sleep(0.3); s.listen(); time.sleep(600)"
    )
    argv = (sys.executable, "-c", listens, str(path))
    await watched.supervisor.start(Program(name="one", argv=argv, ready_socket=path, files=(path,)))
    assert watched.states("one") == ["starting", "ready"]
    _, writer = await asyncio.open_unix_connection(str(path))
    writer.close()
    await watched.supervisor.stop()
    assert not path.exists()
