"""Programs made from a configuration: what they run, where they are reached, how they stop."""

import os
import shlex
from pathlib import Path

from pdd.config.load import parse_config
from pdd.config.schema import PddConfig
from pdd.launch import fleet
from pdd.launch.program import Program


def config() -> PddConfig:
    return parse_config(
        {
            "run_dir": "/run/pdd",
            "model": {"path": "org/model", "name": "m"},
            "engines": [
                {
                    "id": "p0",
                    "role": "prefill",
                    "host": "0.0.0.0",
                    "port": 24201,
                    "data_port": 24202,
                    "control_port": 24203,
                    "env": {"NOTE": "two words"},
                }
            ],
            "links": [
                {
                    "rate": "1mbit",
                    "delay": "1ms",
                    "control": "127.0.0.1:24205",
                    "forwards": [{"listen": "[::1]:24204", "target": "127.0.0.1:24202"}],
                }
            ],
        },
        source="test",
        environ={},
    )


def programs() -> dict[str, Program]:
    made, path = config(), Path("/etc/pdd.toml")
    engine = made.engines[0]
    return {
        "engine": fleet.engine_program(made, engine),
        "agent": fleet.agent_program(made, engine, config_path=path),
        "router": fleet.router_program(made, config_path=path),
        "link": fleet.link_program(made, config_path=path),
    }


def test_readiness_is_asked_where_this_machine_reaches_it() -> None:
    made = programs()
    assert made["engine"].ready_url == "http://127.0.0.1:24201/health"
    assert made["agent"].ready_url == "http://127.0.0.1:24203/health"
    assert made["router"].ready_url == "http://127.0.0.1:8000/ready"
    assert made["link"].ready_url == "http://127.0.0.1:24205/state"


def test_every_port_names_its_key() -> None:
    made = programs()
    assert [(use.port, use.key) for use in made["agent"].ports] == [
        (24202, "engines[0].data_port, p0"),
        (24203, "engines[0].control_port, p0"),
    ]
    assert [(use.host, use.port, use.key) for use in made["link"].ports] == [
        ("::1", 24204, "links[0].forwards[0].listen"),
        ("127.0.0.1", 24205, "links[0].control"),
    ]


def test_the_ports_of_kv_events_are_checked_before_an_engine_starts() -> None:
    made = config()
    engine = made.engines[0].model_copy(update={"events_port": 24206})
    made = made.model_copy(update={"engines": (engine,)})
    assert [(use.port, use.key) for use in fleet.engine_program(made, engine).ports] == [
        (24201, "engines[0].port, p0"),
        (24206, "engines[0].events_port, p0"),
        (24207, "engines[0].events_port + 1, p0"),
    ]


def test_what_may_be_left_behind_is_known() -> None:
    made = programs()
    assert made["agent"].files == (Path("/run/pdd/p0.sock"),)
    shared_memory, *event_sockets = made["engine"].files
    assert shared_memory.parent == Path("/dev/shm")
    assert [socket.parent for socket in event_sockets] == [Path("/run/pdd")] * 2


def test_the_router_stops_first_and_the_line_last() -> None:
    made = programs()
    assert sorted(made, key=lambda name: made[name].stop_order) == ["router", "engine", "agent", "link"]


def test_a_shell_line_runs_as_it_is() -> None:
    made = programs()
    line = fleet.shell_line(made["engine"])
    assert "NOTE='two words' " in line
    words = shlex.split(line)
    assert words[words.index("serve") - 1] == "vllm"
    assert fleet.shell_line(made["agent"]).endswith("pdd agent --config /etc/pdd.toml --engine p0")
    assert os.sep not in words[words.index("serve") - 1]


def test_routers_that_share_a_folder_have_a_parse_process_each() -> None:
    made, path = config(), Path("/etc/pdd.toml")
    other = made.model_copy(update={"router": made.router.model_copy(update={"port": 8001})})
    first, second = (fleet.parser_program(each, config_path=path) for each in (made, other))
    assert first.files == (first.ready_socket,) == (Path("/run/pdd/parser-8000.sock"),)
    assert second.files == (second.ready_socket,) == (Path("/run/pdd/parser-8001.sock"),)
    assert fleet.shell_line(second).endswith("pdd parser --config /etc/pdd.toml --port 8001")
