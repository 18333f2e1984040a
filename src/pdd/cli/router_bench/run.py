"""Boots the fakes and the routers, loads one router after the other, and puts the figures together."""

import json
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdd.cli.router_bench.frames import CHUNK_TOKENS, MODEL, write_tokenizer
from pdd.cli.router_bench.load import Load, Result
from pdd.config.load import load_config
from pdd.launch.child import Child
from pdd.launch.fleet import router_program
from pdd.launch.program import PortUse, Program
from pdd.launch.supervisor import Supervisor

ROLES = {"p0": ("prefill", "a"), "rld0": ("relay", "a"), "md0": ("main", "b")}
HOST = "127.0.0.1"
FILES = 16_384
"""Open files a router needs for 1000 streams, with room."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        base_port: First of a dozen free ports.
        vllm_router: The program to compare with; None: no comparison.
        streams: Streams for CPU time and first bytes.
        many_streams: Streams for memory.
        window_s: Length of the quiet window that CPU time is taken in.
        saturating_tokens: Tokens of each stream of the run without pauses.
        work_dir: For logs, the configuration and the tokenizer.
    """

    base_port: int
    vllm_router: str | None
    streams: int
    many_streams: int
    window_s: float
    saturating_tokens: int
    work_dir: Path

    @property
    def engines(self) -> dict[str, list[int]]:
        """API port and control port of each fake engine."""
        return {e: [self.base_port + 2 * i, self.base_port + 2 * i + 1] for i, e in enumerate(ROLES)}

    @property
    def router_port(self) -> int:
        """Of PDD's router; vllm-router has the next two."""
        return self.base_port + 2 * len(ROLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one router showed: with paced streams, with many of them, and with unpaced ones."""

    paced: Result
    many: Result
    saturating: Result

    def as_dict(self) -> dict[str, Any]:
        """The figures as they are printed."""
        loads = (self.paced, self.many, self.saturating)
        window, crowd, full = self.paced.window, self.many.window, self.saturating
        assert window is not None
        assert crowd is not None
        requests = len(self.paced.first_byte_s) or 1
        per_token_s = window.cpu_s / max(1, window.tokens)
        rest_s = max(0.0, self.paced.cpu_s - per_token_s * self.paced.tokens)
        return {
            "cpu_us_per_token": round(per_token_s * 1e6, 1),
            "cpu_us_per_token_saturating": round(full.cpu_s / max(1, full.tokens) * 1e6, 1),
            "cpu_us_per_request": round(rest_s / requests * 1e6),
            "first_byte_p50_s": _rounded(self.paced.first_byte_percentile_s(50)),
            "first_byte_p99_s": _rounded(self.paced.first_byte_percentile_s(99)),
            f"rss_mb_{self.many.streams}_streams": round(crowd.resident_bytes / 1e6, 1),
            "rss_open_streams": crowd.open_streams,
            "tokens_per_s_saturating": round(full.tokens / full.elapsed_s),
            "lost_events": sum(load.lost_events for load in loads),
            "errors": sorted({error for load in loads for error in load.errors}),
        }


async def run_bench(supervisor: Supervisor, options: Options, tell: Tell) -> dict[str, Any]:
    """The figures of both routers, those of vllm-router with its name in front (null without it)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard) if hard > 0 else FILES, hard))
    write_tokenizer(options.work_dir)
    await supervisor.start(fleet_program(options))
    router = await supervisor.start(pdd_program(options))
    ours = await measure(supervisor, options, router, "pdd", options.router_port, tell)
    await router.stop()
    figures = ours.as_dict()
    theirs: dict[str, Any] = dict.fromkeys(figures)
    if options.vllm_router is not None:
        other = await supervisor.start(vllm_router_program(options, options.vllm_router))
        port = options.router_port + 1
        theirs = (await measure(supervisor, options, other, "vllm-router", port, tell)).as_dict()
        await other.stop()
    return figures | {f"vllm_router_{name}": value for name, value in theirs.items()}


async def measure(
    supervisor: Supervisor, options: Options, router: Child, name: str, port: int, tell: Tell
) -> Figures:
    """One router under the three loads."""

    async def load(kind: str, **values: Any) -> Result:
        tell(f"{name}: {values['streams']} streams of {values['tokens']} tokens, {kind}")
        return await run_load(
            supervisor, Load(port=port, router_pid=router.pid, **values), name=f"load-{name}-{kind}"
        )

    ramp_s, settle_s = options.streams / 100, 2.0
    busy_s = ramp_s + settle_s + options.window_s + 2.0
    await load("warm-up", streams=4, tokens=20, interval_s=0.0, ramp_s=0.1)
    paced = await load(
        "paced",
        streams=options.streams,
        tokens=int(busy_s / 0.2),
        interval_s=0.2,
        ramp_s=ramp_s,
        settle_s=settle_s,
        window_s=options.window_s,
    )
    ramp_s = options.many_streams / 50
    many = await load(
        "many",
        streams=options.many_streams,
        tokens=int(2 * ramp_s + settle_s + 3),
        interval_s=1.0,
        ramp_s=ramp_s,
        settle_s=settle_s,
        window_s=1.0,
    )
    saturating = await load(
        "saturating", streams=16, tokens=options.saturating_tokens, interval_s=0.0, ramp_s=0.1
    )
    return Figures(paced=paced, many=many, saturating=saturating)


async def run_load(supervisor: Supervisor, load: Load, *, name: str) -> Result:
    """The load has run in a process of its own."""
    program = Program(
        name=name, argv=_module("load", msgspec.json.encode(load).decode()), ready_timeout_s=600, ends=True
    )
    return msgspec.json.decode((await supervisor.run(program))[-1], type=Result)


def fleet_program(options: Options) -> Program:
    """The fake engines and agents."""
    ports = [port for pair in options.engines.values() for port in pair]
    return Program(
        name="fleet",
        argv=_module("fleet", json.dumps(options.engines)),
        ready_url=f"http://{HOST}:{ports[0]}/health",
        ports=tuple(PortUse(host=HOST, port=port, key="--base-port") for port in ports),
        stop_order=2,
    )


def pdd_program(options: Options) -> Program:
    """PDD's router; every request is relayed and handed over."""
    path = options.work_dir / "pdd.toml"
    path.write_text(bench_toml(options))
    return router_program(load_config(path, environ={}), config_path=path)


def bench_toml(options: Options) -> str:
    """Three engines on two sites, as the fakes are."""
    tables = [
        f'model = {{path = "{options.work_dir}", name = "{MODEL}"}}',
        f"kv = {{block_size_tokens = {CHUNK_TOKENS}}}",
        f'router = {{port = {options.router_port}, pipeline = "p-rld-md", drain_timeout_s = 1}}',
    ]
    for engine, (role, site) in ROLES.items():
        port, control_port = options.engines[engine]
        ports = f"port = {port}\ncontrol_port = {control_port}\ndata_port = 1\nmax_num_seqs = 4096"
        tables.append(f'[[engines]]\nid = "{engine}"\nrole = "{role}"\nsite = "{site}"\n{ports}')
    return "\n".join(tables) + "\n"


def vllm_router_program(options: Options, executable: str) -> Program:
    """vllm-router over the same prefill and decode engines."""
    port = options.router_port + 1
    p0, md0 = (f"http://{HOST}:{options.engines[engine][0]}" for engine in ("p0", "md0"))
    pd = ("--vllm-pd-disaggregation", "--prefill", p0, "--decode", md0, "--policy", "round_robin")
    listen = ("--host", HOST, "--port", str(port), "--prometheus-port", str(port + 1))
    more = ("--log-level", "warning", "--worker-startup-check-interval", "1")
    return Program(
        name="vllm-router",
        argv=(executable, *pd, *listen, *more),
        ready_url=f"http://{HOST}:{port}/health",
        ports=tuple(PortUse(host=HOST, port=p, key="--base-port") for p in (port, port + 1)),
        grace_s=2.0,
    )


def find_vllm_router(given: str | None) -> str | None:
    """The executable, if there is one."""
    return shutil.which(given or "vllm-router")


def _module(name: str, argument: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"pdd.cli.router_bench.{name}", argument)


def _rounded(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s, 5)
