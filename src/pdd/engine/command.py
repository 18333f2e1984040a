"""The command lines of PDD's engines: stock ``vllm serve`` with the flags that make it work with an agent.

Imports no vLLM, so that it can also print command lines where vLLM is not installed.
"""

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from pdd.config.load import kv_event_addresses
from pdd.config.schema import EngineConfig, PddConfig

CPU_STEP_TOKENS: Final = 512
"""Tokens of one step on the CPU backend. A prompt's chunks leave step by step, so smaller steps overlap more
of the transfer with the prefill; at some hundred tokens a second this is one to three seconds of work."""

RUNNER_VARIABLE: Final = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's choice of its model runner; on GPUs the second unless it is 0."""

CARRIERS: Final[Mapping[str, tuple[str, ...]]] = {
    runner: tuple(f"pdd.engine.carried_state:{name}" for name in classes)
    for runner, classes in {"v1": ("V1Penalties", "V1Draws"), "v2": ("V2Penalties",)}.items()
}
"""The logits processors of each model runner that continue penalties and seeds."""

ONE_PROCESS_EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in the engine core's process. For the CPU backend vLLM replaces its short name, ``uni``, by
a worker process of its own, which lets it bind OpenMP threads to cores. Here they are not bound, and the
process costs 15 s of a start (a third of it) and 0.6 GB.

Source: vllm/platforms/cpu.py@0.32.0 (``check_and_update_config``), vllm/v1/executor/abstract.py@0.32.0
(``Executor.get_class`` takes the name of a class).
"""

_PARALLEL_FLAGS: Final = ("-tp", "-pp", "-dp", "-pcp", "-dcp")
"""Short forms of vLLM's ``--...-parallel-...`` flags."""

CPU_KV_CACHE_GIB: Final = 1
"""Device cache of an engine on the CPU backend; 20000 tokens of the demo model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """One engine's process.

    ``env`` is laid over the environment of whoever starts it. ``shm_files`` (shared memory and sockets) may
    be left behind by an engine that dies; remove them once it is gone.
    """

    argv: list[str]
    env: dict[str, str]
    shm_files: list[Path]


def engine_command(
    config: PddConfig,
    engine: EngineConfig,
    *,
    agent_socket: Path,
    run_id: str | None = None,
    cpu_backend: bool | None = None,
) -> EngineCommand:
    """The command that serves one engine beside its agent.

    Args:
        config: The whole configuration.
        engine: The engine to start.
        agent_socket: Where its agent listens.
        run_id: Makes the name of its shared memory unique; default: random.
        cpu_backend: Whether vLLM runs on the CPU; default: found out.
    """
    kv_engine_id = f"pdd-{engine.id}-{run_id or secrets.token_hex(4)}"
    on_cpu = is_cpu_backend(engine.env) if cpu_backend is None else cpu_backend
    argv = [
        *_common_argv(config, engine.vllm_args, host=engine.host, port=engine.port, on_cpu=on_cpu),
        "--enable-scale-out",
        "--enable-request-id-headers",
        # Of a sliding window all chunks are kept, else those at the end of a prompt or reply are missing.
        "--prefix-cache-retention-interval",
        "None",
        "--kv-transfer-config",
        json.dumps(_kv_transfer_config(config, engine, kv_engine_id, agent_socket)),
        "--kv-events-config",
        json.dumps(_kv_events_config(engine, agent_socket)),
    ]
    if engine.max_num_seqs is not None:
        argv += ["--max-num-seqs", str(engine.max_num_seqs)]
    if config.carries_sampler_state:
        argv += ["--logits-processors", *_carried_state(engine.env, on_cpu=on_cpu)]
    # The operator's own flags come last: vLLM takes the last of repeated ones.
    return EngineCommand(
        argv=[*argv, *engine.vllm_args],
        env={**_common_env(config, on_cpu=on_cpu), **engine.env},
        shm_files=[
            Path(f"/dev/shm/vllm_offload_{kv_engine_id}.mmap"),  # noqa: S108  # vLLM's choice
            *_event_sockets(engine, agent_socket),
        ],
    )


def plain_engine_command(
    config: PddConfig,
    *,
    host: str = "127.0.0.1",
    port: int,
    vllm_args: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    cpu_backend: bool | None = None,
) -> EngineCommand:
    """The command of one engine that serves the same model alone: the reference answers are compared with.

    Args:
        config: The whole configuration.
        host: Address it binds to.
        port: Port it binds to.
        vllm_args: More flags.
        env: More environment.
        cpu_backend: As for ``engine_command``.
    """
    on_cpu = is_cpu_backend(env or {}) if cpu_backend is None else cpu_backend
    argv = _common_argv(config, vllm_args, host=host, port=port, on_cpu=on_cpu)
    return EngineCommand(
        argv=[*argv, "--enable-scale-out", *vllm_args],
        env={**_common_env(config, on_cpu=on_cpu), **(env or {})},
        shm_files=[],
    )


def is_cpu_backend(env: Mapping[str, str]) -> bool:
    """Whether the engine will run on the CPU: ``VLLM_TARGET_DEVICE`` says it, else the installed vLLM."""
    device = env.get("VLLM_TARGET_DEVICE") or os.environ.get("VLLM_TARGET_DEVICE")
    if device:
        return device == "cpu"
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return False


def _carried_state(env: Mapping[str, str], *, on_cpu: bool) -> tuple[str, ...]:
    """The logits processors that continue penalties and seeds, for the model runner the engine will use."""
    runner = env.get(RUNNER_VARIABLE) or os.environ.get(RUNNER_VARIABLE)
    return CARRIERS["v1" if on_cpu or runner == "0" else "v2"]


def _vllm_program() -> str:
    """The ``vllm`` of this environment, whatever the caller's PATH; the bare name if there is none here."""
    beside_python = Path(sys.executable).parent / "vllm"
    return str(beside_python) if beside_python.exists() else "vllm"


def _common_argv(
    config: PddConfig, vllm_args: Sequence[str], *, host: str, port: int, on_cpu: bool
) -> list[str]:
    model, kv = config.model, config.kv
    argv = [_vllm_program(), "serve", model.path, "--served-model-name", model.name, "--host", host]
    argv += ["--port", str(port), "--dtype", model.dtype, "--block-size", str(kv.block_size_tokens)]
    argv += ["--enable-prefix-caching", "--prefix-caching-hash-algo", kv.hash_algo]
    argv += ["--enable-prompt-tokens-details"]
    if model.max_model_len is not None:
        argv += ["--max-model-len", str(model.max_model_len)]
    if model.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", model.tool_call_parser]
    if model.reasoning_parser is not None:
        argv += ["--reasoning-parser", model.reasoning_parser]
    if on_cpu:
        argv += ["--enforce-eager", "--max-num-batched-tokens", str(CPU_STEP_TOKENS)]
        if not _ask_for_several_workers(vllm_args):
            argv += ["--distributed-executor-backend", ONE_PROCESS_EXECUTOR]
    return argv


def _ask_for_several_workers(vllm_args: Sequence[str]) -> bool:
    return any(arg.startswith(_PARALLEL_FLAGS) or "-parallel-" in arg for arg in vllm_args)


def _kv_transfer_config(
    config: PddConfig, engine: EngineConfig, kv_engine_id: str, agent_socket: Path
) -> dict[str, Any]:
    tier = {
        "type": "PddTier",
        "module_path": "pdd.engine.tier",
        "agent_socket": str(agent_socket),
        "hash_algo": config.kv.hash_algo,
        "hash_seed": config.kv.hash_seed,
        "chunk_tokens": config.kv.chunk_tokens,
    }
    return {
        "kv_connector": "PddConnector",
        "kv_connector_module_path": "pdd.engine.connector",
        "kv_role": "kv_both",
        "engine_id": kv_engine_id,
        # A chunk that cannot be loaded is recomputed; the request does not fail for it.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "PddOffloadingSpec",
            "spec_module_path": "pdd.engine.spec",
            "cpu_bytes_to_use": engine.primary_bytes,
            "blocks_per_chunk": config.kv.blocks_per_chunk,
            # Engines of different tensor parallelism then read each other's chunks.
            "canonical_layout": True,
            # Replies are the next turn's prefix.
            "offload_prompt_only": False,
            "secondary_tiers": [tier],
        },
    }


def _kv_events_config(engine: EngineConfig, agent_socket: Path) -> dict[str, Any]:
    """What makes the engine say which blocks its caches gain and lose; a router follows it."""
    addresses = kv_event_addresses(engine, agent_socket=agent_socket)
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": addresses.publish,
        "replay_endpoint": addresses.publish_replay,
    }


def _event_sockets(engine: EngineConfig, agent_socket: Path) -> list[Path]:
    addresses = kv_event_addresses(engine, agent_socket=agent_socket)
    return [
        Path(address.removeprefix("ipc://"))
        for address in (addresses.publish, addresses.publish_replay)
        if address.startswith("ipc://")
    ]


def _common_env(config: PddConfig, *, on_cpu: bool) -> dict[str, str]:
    env = {"PYTHONHASHSEED": config.kv.hash_seed}
    if on_cpu:
        threads = max(1, (os.cpu_count() or 1) // len(config.engines))
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB),
            # More threads than cores wait for each other: a busy neighbour made decoding 15 times slower.
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The first request with logprobs would compile for 20 s.
            "TORCHDYNAMO_DISABLE": "1",
            RUNNER_VARIABLE: "0",
        }
    return env
