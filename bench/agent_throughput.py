"""Throughput of one transfer between two agent processes on loopback, and what an idle agent costs.

    python bench/agent_throughput.py [MB] [CHUNK_KIB] [STREAMS] [TLS]

TLS is 1 for TLS 1.3 between the agents, 0 (the default) for plain TCP.

Prints one JSON object: MB/s from the order to LANDED, and CPU seconds per GB on each side.
"""

import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit.agent_fleet import AgentProcess, EventReader, make_config
from tests.kit.engine_side import FakeEngine, key_of

from pdd.cli.certs import make_certificates

IDLE_S = 5.0


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main(megabytes: int = 512, chunk_kib: int = 1024, streams: int = 4, tls: int = 0) -> None:
    run_dir = Path(tempfile.mkdtemp())
    num_chunks = megabytes * 1024 // chunk_kib
    certs = run_dir / "certs" if tls else None
    if certs is not None:
        make_certificates(certs, ["p0", "md0"], days=1)
    config = make_config(run_dir, store_bytes=(megabytes + 64) * 2**20, streams=streams, certs=certs)
    agents = [AgentProcess(config, "p0"), AgentProcess(config, "md0")]
    try:
        options = {"chunk_bytes": chunk_kib * 1024, "num_slots": 64}
        prefill, receiver = (agent.engine(**options) for agent in agents)
        events = EventReader(agents[0].control_url)
        prefill.push("warm", ["md0"], ["warm"])
        events.wait("landed", transfer="warm")
        # The first round also pays for the kernel's first touch of every page of both stores.
        rounds = [transfer(name, prefill, agents, events, num_chunks) for name in ("cold", "warm")]
        before = [cpu_s(agent.pid) for agent in agents]
        time.sleep(IDLE_S)
        idle = [(cpu_s(agent.pid) - old) / IDLE_S for agent, old in zip(agents, before, strict=True)]
        threads = [psutil.Process(agent.pid).num_threads() for agent in agents]
        idle_ratios = [round(ratio, 4) for ratio in idle]
        print(
            json.dumps({"rounds": rounds, "idle_core_ratio": idle_ratios, "num_threads": threads}, indent=2)
        )
        events.close()
        for engine in (prefill, receiver):
            engine.close()
    finally:
        for agent in agents:
            agent.stop()


def transfer(
    name: str, engine: FakeEngine, agents: list[AgentProcess], events: EventReader, num_chunks: int
) -> dict[str, float | str]:
    keys = store_all(name, engine, num_chunks)
    before = [cpu_s(agent.pid) for agent in agents]
    start_s = time.monotonic()
    engine.begin(name, name, ["md0"], num_chunks * engine.chunk_tokens)
    offer_all(name, engine, keys)
    engine.finish(name)
    landed = events.wait("landed", transfer=name)
    elapsed_s = time.monotonic() - start_s
    used_s = [cpu_s(agent.pid) - old for agent, old in zip(agents, before, strict=True)]
    gigabytes = landed["payload_bytes"] / 1e9
    release = f"{agents[1].control_url}/v1/transfers/{name}/release"
    urllib.request.urlopen(urllib.request.Request(release, method="POST", data=b"")).close()
    return {
        "round": name,
        "mb_per_s": round(gigabytes * 1000 / elapsed_s),
        "sender_cpu_s_per_gb": round(used_s[0] / gigabytes, 2),
        "receiver_cpu_s_per_gb": round(used_s[1] / gigabytes, 2),
        "overhead_ratio": round(landed["wan_bytes"] / landed["payload_bytes"] - 1, 6),
    }


def store_all(name: str, engine: FakeEngine, num_chunks: int) -> list[bytes]:
    """The chunks are in the sender's store beforehand: the engine's copies are not what is measured."""
    keys = [key_of(f"{name}-{i}") for i in range(num_chunks)]
    for start in range(0, num_chunks, engine.num_slots):
        part = keys[start : start + engine.num_slots]
        job = engine.store_slots("prepare", part, list(range(len(part))), [32] * len(part))
        engine.wait_stored(job)
    return keys


def offer_all(name: str, engine: FakeEngine, keys: list[bytes]) -> None:
    for start in range(0, len(keys), engine.num_slots):
        part = keys[start : start + engine.num_slots]
        ends = [(start + i + 1) * engine.chunk_tokens for i in range(len(part))]
        engine.store_slots(name, part, list(range(len(part))), ends)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
