"""``pdd bench``: measurements anybody can repeat; with ``--json`` the last line is one JSON object."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdd.cli.router_bench.run import Options, find_vllm_router, run_bench
from pdd.launch.supervisor import Supervisor, run_supervised
from pdd.link.bench import codec as codec_bench
from pdd.link.bench import command as link_bench
from pdd.sim.commands.flags import add_bench as add_simulator_bench

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers


def add_parser(commands: "Subparsers") -> None:
    """``pdd bench`` exists."""
    bench = commands.add_parser("bench", help="measure PDD on this machine")
    benches = bench.add_subparsers(metavar="WHAT", required=True)
    _add_router(benches)
    _add_link(benches)
    _add_codec(benches)
    add_simulator_bench(benches)


def _add_link(benches: "Subparsers") -> None:
    parser = benches.add_parser(
        "link",
        help="goodput, fairness and CPU time of the agents, beside plain TCP and NIXL",
        description="Measure agents, plain TCP streams and NIXL over TCP on one emulated line in one run.",
    )
    link_bench.add_arguments(parser)
    parser.set_defaults(run=link_bench.run)


def _add_codec(benches: "Subparsers") -> None:
    parser = benches.add_parser(
        "codec",
        help="ratio and CPU time of the wire codec on bf16 KV",
        description="Code and decode keys and values as agents do, and compare every byte.",
    )
    codec_bench.add_arguments(parser)
    parser.set_defaults(run=codec_bench.run)


def _add_router(benches: "Subparsers") -> None:
    parser = benches.add_parser(
        "router",
        help="CPU time per token, first byte and memory of the router, beside vllm-router's",
        description="Load this router and vllm-router with many streams from the same fake engines and "
        "compare what they use. Every token is checked. Nothing else should run on the machine meanwhile.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--vllm-router",
        metavar="PROGRAM",
        help="default: vllm-router of PATH; without one nothing is compared",
    )
    parser.add_argument("--streams", type=int, default=500, help="for CPU time and first bytes; default: 500")
    parser.add_argument("--many-streams", type=int, default=1000, help="for memory; default: 1000")
    parser.add_argument("--window-s", type=float, default=6.0, help="CPU time is taken over this; default: 6")
    parser.add_argument(
        "--saturating-tokens", type=int, default=2000, help="of each of 16 unpaced streams; default: 2000"
    )
    parser.add_argument("--base-port", type=int, default=26000, help="first of a dozen ports; default: 26000")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="keep logs here; default: nowhere")
    parser.set_defaults(run=_run_router)


def _run_router(arguments: argparse.Namespace) -> int:
    if arguments.work_dir is not None:
        arguments.work_dir.mkdir(parents=True, exist_ok=True)
        return _bench_router(arguments, arguments.work_dir)
    with tempfile.TemporaryDirectory(prefix="pdd-bench-") as folder:
        return _bench_router(arguments, Path(folder))


def _bench_router(arguments: argparse.Namespace, work_dir: Path) -> int:
    program = find_vllm_router(arguments.vllm_router)
    if program is None:
        wanted = arguments.vllm_router or "vllm-router"
        _say(f"{wanted} is not installed: its figures are null (pip install vllm-router)")
    options = Options(
        base_port=arguments.base_port,
        vllm_router=program,
        streams=arguments.streams,
        many_streams=arguments.many_streams,
        window_s=arguments.window_s,
        saturating_tokens=arguments.saturating_tokens,
        work_dir=work_dir,
    )
    figures: dict[str, Any] = {}

    async def main(supervisor: Supervisor) -> int:
        figures.update(await run_bench(supervisor, options, _say))
        return 0

    status = run_supervised(main, log_dir=work_dir)
    if figures:
        print(json.dumps(figures) if arguments.json else _table(figures))
        status = status or int(bool(figures["lost_events"]))
    return status


def _table(figures: dict[str, Any]) -> str:
    names = [name for name in figures if not name.startswith("vllm_router_")]
    rows = [("", "pdd", "vllm-router"), *((n, figures[n], figures.get(f"vllm_router_{n}")) for n in names)]
    return "\n".join(f"{name:32}{ours!s:>16}{theirs!s:>16}" for name, ours, theirs in rows)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
