"""Command lines of the engines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdd.config.load import parse_config
from pdd.config.schema import PddConfig
from pdd.engine.command import (
    ONE_PROCESS_EXECUTOR,
    engine_command,
    is_cpu_backend,
    plain_engine_command,
)

SOCKET = Path("/run/pdd/md0.sock")


def fleet(**engine: Any) -> PddConfig:
    values = {
        "model": {"path": "/models/m", "name": "demo", "dtype": "float32", "max_model_len": 8192},
        "kv": {"block_size_tokens": 32, "blocks_per_chunk": 2, "hash_seed": "42"},
        "engines": [
            {"id": "md0", "role": "main", "port": 8103, "data_port": 8203, "control_port": 8303} | engine
        ],
    }
    return parse_config(values, source="test", environ={})


def command(cpu_backend: bool = True, **engine: Any) -> tuple[list[str], dict[str, str], list[Path]]:
    config = fleet(**engine)
    made = engine_command(
        config, config.engines[0], agent_socket=SOCKET, run_id="r1", cpu_backend=cpu_backend
    )
    return made.argv, made.env, made.shm_files


def value(argv: list[str], flag: str) -> str:
    """The value vLLM would take: that of the last occurrence."""
    return argv[len(argv) - argv[::-1].index(flag)]


def test_the_command_serves_the_model_with_what_the_router_needs() -> None:
    argv, env, _ = command(max_num_seqs=8)
    assert argv[1:3] == ["serve", "/models/m"]
    for flag, expected in {
        "--served-model-name": "demo",
        "--host": "127.0.0.1",
        "--port": "8103",
        "--dtype": "float32",
        "--block-size": "32",
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--max-model-len": "8192",
        "--max-num-seqs": "8",
        "--prefix-cache-retention-interval": "None",
    }.items():
        assert value(argv, flag) == expected
    for flag in ("--enable-scale-out", "--enable-prompt-tokens-details", "--enable-request-id-headers"):
        assert flag in argv
    assert env["PYTHONHASHSEED"] == "42"


def test_the_connector_is_vllms_own_behind_our_check_with_our_spec_and_tier() -> None:
    argv, _, shm_files = command(primary_bytes="64MiB")
    transfer = json.loads(value(argv, "--kv-transfer-config"))
    extra = transfer["kv_connector_extra_config"]
    assert (transfer["kv_connector_module_path"], transfer["kv_connector"]) == (
        "pdd.engine.connector",
        "PddConnector",
    )
    assert extra["canonical_layout"] is True
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert (extra["spec_module_path"], extra["spec_name"]) == ("pdd.engine.spec", "PddOffloadingSpec")
    assert extra["cpu_bytes_to_use"] == 64 * 2**20
    assert extra["blocks_per_chunk"] == 2
    assert extra["offload_prompt_only"] is False
    assert extra["secondary_tiers"] == [
        {
            "type": "PddTier",
            "module_path": "pdd.engine.tier",
            "agent_socket": "/run/pdd/md0.sock",
            "hash_algo": "sha256_cbor",
            "hash_seed": "42",
            "chunk_tokens": 64,
        }
    ]
    assert transfer["engine_id"] == "pdd-md0-r1"
    assert shm_files[0] == Path("/dev/shm/vllm_offload_pdd-md0-r1.mmap")


def test_the_engine_says_what_its_caches_hold_on_sockets_that_are_cleaned_up_or_on_its_ports() -> None:
    argv, _, files = command()
    events = json.loads(value(argv, "--kv-events-config"))
    assert events == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/pdd/md0.kv",
        "replay_endpoint": "ipc:///run/pdd/md0.kvr",
    }
    assert files[1:] == [Path("/run/pdd/md0.kv"), Path("/run/pdd/md0.kvr")]
    argv, _, files = command(events_port=5557)
    events = json.loads(value(argv, "--kv-events-config"))
    assert (events["endpoint"], events["replay_endpoint"]) == (
        "tcp://[::ffff:127.0.0.1]:5557",
        "tcp://[::ffff:127.0.0.1]:5558",
    )
    assert len(files) == 1


def test_runs_do_not_share_memory_names() -> None:
    config = fleet()
    names = {
        tuple(engine_command(config, config.engines[0], agent_socket=SOCKET, cpu_backend=True).shm_files)
        for _ in range(4)
    }
    assert len(names) == 4


def test_gpus_get_no_settings_of_the_cpu_backend() -> None:
    argv, env, _ = command(cpu_backend=False)
    assert "--enforce-eager" not in argv
    assert "--max-num-batched-tokens" not in argv
    assert env == {"PYTHONHASHSEED": "42"}


def test_the_cpu_backend_is_kept_from_compiling_and_from_fighting_for_cores() -> None:
    argv, env, _ = command()
    assert "--enforce-eager" in argv
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(env["OMP_NUM_THREADS"]) >= 1


def test_the_operators_flags_and_environment_win() -> None:
    argv, env, _ = command(
        vllm_args=["--max-num-batched-tokens", "64"], env={"OMP_NUM_THREADS": "3", "X": "1"}
    )
    assert value(argv, "--max-num-batched-tokens") == "64"
    assert (env["OMP_NUM_THREADS"], env["X"]) == ("3", "1")


def test_the_reference_engine_serves_the_same_model_without_a_connector() -> None:
    plain = plain_engine_command(fleet(), port=9000, vllm_args=("--max-num-seqs", "4"), cpu_backend=True)
    served, _, _ = command()
    assert "--kv-transfer-config" not in plain.argv
    assert value(plain.argv, "--port") == "9000"
    assert value(plain.argv, "--max-num-seqs") == "4"
    for flag in (
        "--dtype",
        "--block-size",
        "--max-model-len",
        "--served-model-name",
        "--max-num-batched-tokens",
    ):
        assert value(plain.argv, flag) == value(served, flag)
    assert plain.shm_files == []


def test_optional_limits_are_left_to_vllm() -> None:
    argv, _, _ = command()
    assert "--max-num-seqs" not in argv


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("cuda", False)])
def test_the_environment_says_which_backend(device: str, expected: bool) -> None:
    assert is_cpu_backend({"VLLM_TARGET_DEVICE": device}) is expected


def test_importing_it_needs_no_vllm() -> None:
    code = (
        "import sys, pdd.engine.command, pdd.engine.models\n"
        "sys.exit(' '.join({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.strip() == ""


@pytest.mark.parametrize(
    ("cpu_backend", "engine", "classes"),
    [
        (True, {}, ["V1Penalties", "V1Draws"]),
        (False, {}, ["V2Penalties"]),
        (False, {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, ["V1Penalties", "V1Draws"]),
    ],
)
def test_engines_continue_penalties_and_seeds(
    cpu_backend: bool, engine: dict[str, Any], classes: list[str]
) -> None:
    argv, _, _ = command(cpu_backend, **engine)
    at = argv.index("--logits-processors") + 1
    assert argv[at : at + len(classes)] == [f"pdd.engine.carried_state:{name}" for name in classes]
    assert all(arg.startswith("--") for arg in argv[at + len(classes) :][:1])


def test_engines_that_guess_ahead_continue_neither_and_the_router_knows() -> None:
    arguments = ("--speculative-config", '{"method": "ngram"}')
    assert "--logits-processors" not in command(vllm_args=arguments)[0]
    assert not fleet(vllm_args=arguments).carries_sampler_state
    assert not fleet(vllm_args=("--logits-processors=mine:Own",)).carries_sampler_state
    assert fleet().carries_sampler_state


def test_engines_know_the_parsers_names() -> None:
    config = fleet()
    model = config.model.model_copy(update={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"})
    config = config.model_copy(update={"model": model})
    argv = engine_command(config, config.engines[0], agent_socket=SOCKET, cpu_backend=True).argv
    assert "--enable-auto-tool-choice" in argv
    assert (value(argv, "--tool-call-parser"), value(argv, "--reasoning-parser")) == ("hermes", "qwen3")
    assert not {"--tool-call-parser", "--reasoning-parser", "--enable-auto-tool-choice"} & {*command()[0]}


@pytest.mark.parametrize(
    ("vllm_args", "cpu_backend", "is_one_process"),
    [
        ((), True, True),
        (("--max-num-seqs", "4"), True, True),
        (("--tensor-parallel-size", "2"), True, False),
        (("--tensor-parallel-size=2",), True, False),
        (("-tp", "2"), True, False),
        (("--data-parallel-size", "2"), True, False),
        ((), False, False),
    ],
)
def test_the_cpu_backend_runs_a_lone_worker_in_the_engines_process(
    vllm_args: tuple[str, ...], cpu_backend: bool, is_one_process: bool
) -> None:
    plain = plain_engine_command(fleet(), port=9000, vllm_args=vllm_args, cpu_backend=cpu_backend)
    made, _, _ = command(cpu_backend, vllm_args=list(vllm_args))
    for argv in (made, plain.argv):
        assert (ONE_PROCESS_EXECUTOR in argv) is is_one_process


def test_the_operators_own_executor_wins() -> None:
    argv, _, _ = command(vllm_args=["--distributed-executor-backend", "mp"])
    assert value(argv, "--distributed-executor-backend") == "mp"
