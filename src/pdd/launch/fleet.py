"""The programs of a deployment, made from its configuration: engines, agents, router, link."""

import shlex
import sys
from pathlib import Path

from pdd.config.load import agent_socket, parse_socket
from pdd.config.schema import EngineConfig, LinkConfig, PddConfig
from pdd.engine.command import engine_command, plain_engine_command
from pdd.launch.program import PortUse, Program

ENGINE_READY_S = 900.0
"""An engine loads its model and profiles its memory: a minute for a small one, many for one of 100 GB."""
ENGINE_GRACE_S = 15.0
PARSER_READY_S = 300.0
"""It imports vLLM: 11 s of CPU time, which may take long on a busy host."""

STOP_ROUTER, STOP_ENGINES, STOP_AGENTS, STOP_LINK = range(4)
"""The router first, since it can still end its requests; agents after engines, whose copies they make."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Our own programs use numpy for copies only; its thread pool would just compete with the engines."""


def engine_program(config: PddConfig, engine: EngineConfig) -> Program:
    """The program ``vllm serve`` of one engine."""
    command = engine_command(config, engine, agent_socket=agent_socket(config, engine.id))
    return Program(
        name=f"engine-{engine.id}",
        argv=tuple(command.argv),
        env=command.env,
        ready_url=f"{_local_url(engine.host, engine.port)}/health",
        ready_timeout_s=ENGINE_READY_S,
        ports=tuple(
            _port(config, engine, key) for key in engine.ports if key not in ("data_port", "control_port")
        ),
        files=tuple(command.shm_files),
        stop_order=STOP_ENGINES,
        grace_s=ENGINE_GRACE_S,
    )


def reference_program(config: PddConfig, *, port: int) -> Program:
    """A plain engine with the same model and no agent, for comparing answers."""
    command = plain_engine_command(config, port=port)
    return Program(
        name="engine-reference",
        argv=tuple(command.argv),
        env=command.env,
        ready_url=f"{_local_url('127.0.0.1', port)}/health",
        ready_timeout_s=ENGINE_READY_S,
        ports=(PortUse(host="127.0.0.1", port=port, key="the reference engine"),),
        files=tuple(command.shm_files),
        stop_order=STOP_ENGINES,
        grace_s=ENGINE_GRACE_S,
    )


def agent_program(config: PddConfig, engine: EngineConfig, *, config_path: Path) -> Program:
    """The agent beside one engine."""
    return Program(
        name=f"agent-{engine.id}",
        argv=pdd_argv("agent", "--config", str(config_path), "--engine", engine.id),
        env=dict(_ONE_THREAD),
        ready_url=f"{_local_url(engine.host, engine.control_port)}/health",
        ports=(_port(config, engine, "data_port"), _port(config, engine, "control_port")),
        files=(agent_socket(config, engine.id),),
        stop_order=STOP_AGENTS,
    )


def router_program(config: PddConfig, *, config_path: Path) -> Program:
    """The OpenAI endpoint."""
    router = config.router
    return Program(
        name="router",
        argv=pdd_argv("router", "--config", str(config_path)),
        env=dict(_ONE_THREAD),
        ready_url=f"{router_url(config)}/ready",
        ready_timeout_s=120.0,
        ports=(PortUse(host=router.host, port=router.port, key="router.port"),),
        stop_order=STOP_ROUTER,
        grace_s=router.drain_timeout_s + 5.0,
    )


def router_url(config: PddConfig) -> str:
    """Where this machine reaches the endpoint."""
    return _local_url(config.router.host, config.router.port)


def parser_program(config: PddConfig, *, config_path: Path) -> Program:
    """The process that parses answers for the router beside it."""
    socket = parse_socket(config)
    return Program(
        name="parser",
        argv=pdd_argv("parser", "--config", str(config_path), "--port", str(config.router.port)),
        env=dict(_ONE_THREAD),
        ready_socket=socket,
        ready_timeout_s=PARSER_READY_S,
        files=(socket,),
        stop_order=STOP_ENGINES,
    )


def link_program(config: PddConfig, *, config_path: Path) -> Program:
    """The emulator of every link in the configuration."""
    return Program(
        name="link",
        argv=pdd_argv("link", "--config", str(config_path)),
        env=dict(_ONE_THREAD),
        ready_url=next((f"http://{link.control}/state" for link in config.links if link.control), None),
        ports=tuple(use for index, link in enumerate(config.links) for use in _link_ports(index, link)),
        stop_order=STOP_LINK,
    )


def pdd_argv(*arguments: str) -> tuple[str, ...]:
    """The command line of a ``pdd`` command in this environment, whatever PATH says."""
    return (sys.executable, "-m", "pdd.cli", *arguments)


def shell_line(program: Program) -> str:
    """The program as one line for a shell, with its environment in front."""
    argv = list(program.argv)
    if tuple(argv[:3]) == pdd_argv():
        argv[:3] = ["pdd"]
    elif Path(argv[0]).name == "vllm":
        argv[0] = "vllm"
    environment = [f"{name}={shlex.quote(value)}" for name, value in program.env.items()]
    return " ".join([*environment, shlex.join(argv)])


def _port(config: PddConfig, engine: EngineConfig, key: str) -> PortUse:
    index = config.engines.index(engine)
    return PortUse(host=engine.host, port=engine.ports[key], key=f"engines[{index}].{key}, {engine.id}")


def _link_ports(index: int, link: LinkConfig) -> list[PortUse]:
    addresses = [(f"links[{index}].forwards[{i}].listen", f.listen) for i, f in enumerate(link.forwards)]
    if link.control:
        addresses.append((f"links[{index}].control", link.control))
    return [_port_use(key, address) for key, address in addresses]


def _port_use(key: str, address: str) -> PortUse:
    host, _, port = address.rpartition(":")
    return PortUse(host=host.strip("[]"), port=int(port), key=key)


def _local_url(host: str, port: int) -> str:
    """Where this machine reaches a server bound to ``host``."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
