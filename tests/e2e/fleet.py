"""The fleet of the end-to-end tests: two sites on one machine, one plain engine beside them.

P and RLD in site a, MD in site b behind the emulated line, four routers (one for each way to serve), all as
the launcher starts them for an operator. Booted once for all tests.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.client import Line, PlainEngine, RouterClient, wait_until

from pdd.config.load import parse_config
from pdd.config.schema import PddConfig
from pdd.launch.child import Child
from pdd.launch.fleet import agent_program, engine_program, link_program, reference_program, router_program
from pdd.launch.ports import free_ports
from pdd.launch.procfs import living_members, signal_all, start_ticks, without_trackers
from pdd.launch.supervisor import Progress, Supervisor

CHUNK_TOKENS = 32
MAX_MODEL_LEN = 4096
ROUTERS: dict[str, dict[str, str]] = {
    "auto": {},
    "one-shot": {"PDD_ROUTER__PIPELINE": "p-rld-md", "PDD_ROUTER__HANDOFF": "one-shot"},
    "catch-up": {"PDD_ROUTER__PIPELINE": "p-rld-md", "PDD_ROUTER__HANDOFF": "catch-up"},
    "p-md": {"PDD_ROUTER__PIPELINE": "p-md"},
}
RELAY_PRIMARY_BYTES = 3 * 2**20
"""Holds 48 chunks of the tiny model, 1536 tokens: less than one long prompt (the livelock trap)."""


def fleet_values(
    model_dir: Path, run_dir: Path, *, dtype: str = "float32", all_through_line: bool = False
) -> dict[str, Any]:
    """The configuration as it would stand in ``pdd.toml``.

    With ``all_through_line`` the router reaches every engine and every agent over the line, so that any of
    its connections can be cut.
    """
    ports = iter(free_ports(20))

    def engine(engine_id: str, role: str, site: str, **more: Any) -> dict[str, Any]:
        return {
            "id": engine_id, "role": role, "site": site,
            "port": next(ports), "data_port": next(ports), "control_port": next(ports),
            "store_bytes": "256MiB", "primary_bytes": "64MiB", "max_num_seqs": 8, **more,
        }  # fmt: skip

    engines = [
        engine("p0", "prefill", "a"),
        engine("rld0", "relay", "a", primary_bytes=RELAY_PRIMARY_BYTES),
        engine("md0", "main", "b"),
    ]
    forwards: list[dict[str, str]] = []

    def over_line(port: int) -> str:
        listen = f"127.0.0.1:{next(ports)}"
        forwards.append({"listen": listen, "target": f"127.0.0.1:{port}"})
        return listen

    main = engines[-1]
    main["advertise"] = over_line(main["data_port"])
    for far in engines if all_through_line else [main]:
        far["url"] = f"http://{over_line(far['port'])}"
        if all_through_line:
            far["control_url"] = f"http://{over_line(far['control_port'])}"
    control = f"127.0.0.1:{next(ports)}"
    return {
        "run_dir": str(run_dir),
        "model": {"path": str(model_dir), "name": "pdd", "dtype": dtype, "max_model_len": MAX_MODEL_LEN},
        "kv": {"block_size_tokens": 32, "blocks_per_chunk": CHUNK_TOKENS // 32},
        "router": {"port": next(ports)},
        "policy": {"catch_up_gap_tokens": 8},  # of blocks of 32, so that rounds wait for a block's end, too
        "engines": engines,
        "links": [{"rate": "1gbit", "delay": "15ms", "control": control, "forwards": forwards}],
    }  # fmt: skip


@dataclass(kw_only=True)
class Fleet:
    """A running fleet and what tests ask of it."""

    config: PddConfig
    session: aiohttp.ClientSession
    supervisor: Supervisor
    reference: PlainEngine
    reference_url: str
    line: Line
    eos_token: int
    chunk_bytes: int = 0
    relay_primary_chunks: int = 0
    routers: dict[str, RouterClient] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    keepers: list[asyncio.Task[Any]] = field(default_factory=list)
    max_model_len: int = MAX_MODEL_LEN

    def router(self, mode: str) -> RouterClient:
        """The router that serves in one way: ``auto``, ``one-shot``, ``catch-up`` or ``p-md``."""
        return self.routers[mode]

    async def agent_state(self, engine_id: str) -> dict[str, Any]:
        """What an agent says of itself."""
        url = f"{self.config.engine(engine_id).control_url}/v1/state"
        async with self.session.get(url) as response:
            return dict(await response.json())

    async def stored_chunks(self, engine_id: str) -> int:
        """Chunks in an agent's store."""
        return int((await self.agent_state(engine_id))["store"]["used"])

    async def num_open_transfers(self, engine_id: str, *, at_least: int) -> bool:
        """Whether an agent has so many transfers open."""
        return int((await self.agent_state(engine_id))["transfers"]) >= at_least

    async def requests_on_engines(self) -> dict[str, int]:
        """Requests each engine runs or queues, by its own metrics."""
        counts: dict[str, int] = {}
        for engine in self.config.engines:
            async with self.session.get(f"http://{engine.host}:{engine.port}/metrics") as response:
                text = await response.text()
            counts[engine.id] = sum(
                int(sample.value)
                for family in text_string_to_metric_families(text)
                if family.name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
                for sample in family.samples
            )
        return counts

    async def every_engine_is_free(self) -> bool:
        """Whether no engine runs or queues a request."""
        return not any((await self.requests_on_engines()).values())

    async def any_engine_is_running(self) -> bool:
        """Whether some engine runs a request."""
        return any((await self.requests_on_engines()).values())

    async def reference_text(self, prompt: list[int], *, max_tokens: int) -> str:
        """What the plain engine itself writes."""
        body = {"model": "pdd", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        async with self.session.post(f"{self.reference_url}/v1/completions", json=body) as response:
            return str((await response.json())["choices"][0]["text"])

    async def cpu_share(self, *, window_s: float) -> dict[str, float]:
        """Share of one core each engine (with all its processes) and each agent uses over a window."""
        names = [name for name in self.children if name.startswith(("engine-", "agent-"))]
        before = {name: _cpu_s(self.children[name].pid) for name in names}
        await asyncio.sleep(window_s)
        return {
            name.removeprefix("engine-"): (_cpu_s(self.children[name].pid) - before[name]) / window_s
            for name in names
        }

    def kill_engine(self, engine_id: str) -> None:
        """kill -9 of every process of an engine but Python's resource tracker, which ends by itself."""
        group = self.children[f"engine-{engine_id}"].pid
        signal_all(without_trackers(living_members({group: start_ticks(group)})), signal.SIGKILL)

    def kill_agent(self, engine_id: str) -> None:
        """kill -9 of the agent beside an engine."""
        group = self.children[f"agent-{engine_id}"].pid
        signal_all(living_members({group: start_ticks(group)}), signal.SIGKILL)

    async def wait_engine_restarted(self, engine_id: str) -> None:
        """Return once the supervisor has an engine of that id up again, connected to its agent."""

        async def connected_again() -> bool:
            return bool((await self.agent_state(engine_id))["engine_connected"])

        async def gone() -> bool:
            return not await connected_again()

        await wait_until(gone, what=f"the agent of {engine_id} noticing", timeout_s=30)
        await wait_until(connected_again, what=f"{engine_id} coming back", timeout_s=240)
        await wait_until(
            lambda: self._is_healthy(engine_id), what=f"{engine_id} being healthy", timeout_s=240
        )
        await wait_until(
            lambda: self.is_used_by_every_router(engine_id), what="the routers counting it in", timeout_s=60
        )

    async def _is_healthy(self, engine_id: str) -> bool:
        engine = self.config.engine(engine_id)
        return await _answers(self.session, f"http://{engine.host}:{engine.port}/health")

    @contextlib.contextmanager
    def one_router(self) -> Iterator[None]:
        """Only one router asks the engines how they are, as in a deployment; the others stand still."""
        others = {child.pid for name, child in self.children.items() if name.startswith("router-")}
        others.discard(self.children["router-auto"].pid)
        signal_all(others, signal.SIGSTOP)
        try:
            yield
        finally:
            signal_all(others, signal.SIGCONT)

    async def is_ready(self) -> bool:
        """Whether every router has a whole path."""
        for router in self.routers.values():
            async with self.session.get(f"{router.url}/ready") as response:
                if response.status != 200:
                    return False
        return True

    async def is_used_by_every_router(self, engine_id: str) -> bool:
        """Whether every router counts the engine in; ``/ready`` alone does not say so."""
        for router in self.routers.values():
            async with self.session.get(f"{router.url}/metrics") as response:
                text = await response.text()
            for metric in ("pdd_engine_up", "pdd_peer_state"):
                if f'{metric}{{engine="{engine_id}"}} 1.0' not in text:
                    return False
        return True


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def _cpu_s(pid: int) -> float:
    root = psutil.Process(pid)
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.asynccontextmanager
async def running_fleet(
    model_dir: Path,
    run_dir: Path,
    *,
    dtype: str = "float32",
    routers: Mapping[str, Mapping[str, str]] = ROUTERS,
    all_through_line: bool = False,
) -> AsyncIterator[Fleet]:
    """A fleet that answers; all of it has ended when the block does."""
    values = fleet_values(model_dir, run_dir, dtype=dtype, all_through_line=all_through_line)
    config = parse_config(values, source="tests/e2e/fleet.py", environ={})
    config_path = run_dir / "pdd.toml"
    config_path.write_text(config_toml(values), encoding="utf-8")
    reference_port, *router_ports = free_ports(1 + len(routers))
    reference_url = f"http://127.0.0.1:{reference_port}"
    (link,) = config.links
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        Supervisor(log_dir=run_dir / "logs", on_progress=_print_progress) as supervisor,
    ):
        fleet = Fleet(
            config=config, session=session, supervisor=supervisor, reference_url=reference_url,
            reference=PlainEngine(session, reference_url),
            line=Line(session, f"http://{link.control}", link.forwards[0].listen),
            eos_token=_eos_token(model_dir),
        )  # fmt: skip
        try:
            await _start(
                fleet, config_path, reference_port, dict(zip(router_ports, routers.items(), strict=True))
            )
            yield fleet
        finally:
            for task in fleet.keepers:
                task.cancel()
            await asyncio.gather(*fleet.keepers, return_exceptions=True)


async def _start(
    fleet: Fleet,
    config_path: Path,
    reference_port: int,
    routers: Mapping[int, tuple[str, Mapping[str, str]]],
) -> None:
    config, supervisor = fleet.config, fleet.supervisor
    light = [link_program(config, config_path=config_path)]
    light += [agent_program(config, engine, config_path=config_path) for engine in config.engines]
    for program in light:
        fleet.children[program.name] = await supervisor.start(program)
        fleet.keepers.append(asyncio.create_task(_keep(fleet, program.name)))
    engines = [engine_program(config, engine) for engine in config.engines]
    engines.append(reference_program(config, port=reference_port))
    for program, child in zip(engines, await asyncio.gather(*map(supervisor.start, engines)), strict=True):
        fleet.children[program.name] = child
        fleet.keepers.append(asyncio.create_task(_keep(fleet, program.name)))
    for port, (mode, environment) in routers.items():
        program = router_program(
            config.model_copy(update={"router": config.router.model_copy(update={"port": port})}),
            config_path=config_path,
        )
        environment = {**program.env, **environment, "PDD_ROUTER__PORT": str(port)}
        program = replace(program, name=f"router-{mode}", env=environment)
        fleet.children[program.name] = await supervisor.start(program)
        fleet.routers[mode] = RouterClient(fleet.session, f"http://127.0.0.1:{port}")
    state = await fleet.agent_state("rld0")
    fleet.chunk_bytes = state["chunk_bytes"]
    fleet.relay_primary_chunks = RELAY_PRIMARY_BYTES // fleet.chunk_bytes


async def _keep(fleet: Fleet, name: str) -> None:
    """The program is started again when it ends, as by ``pdd serve``; ``children`` knows the new one."""
    while True:
        child = fleet.children[name]
        await child.wait()
        await child.clean_up()
        fleet.children[name] = await fleet.supervisor.start(child.program)


def _print_progress(progress: Progress) -> None:
    print(f"{progress.name}: {progress.state} {progress.elapsed_s:.0f} s {progress.detail}", flush=True)


def _eos_token(model_dir: Path) -> int:
    eos = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    return int(eos[0] if isinstance(eos, list) else eos)


def config_toml(values: dict[str, Any]) -> str:
    """The values as TOML; tables within arrays are written inline, which TOML allows and json nearly is."""

    def inline(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(inline(item) for item in value) + "]"
        return json.dumps(value)

    return "".join(f"{key} = {inline(value)}\n" for key, value in values.items())
