"""Configuration files, right and wrong, and the environment over them."""

from pathlib import Path

import pytest

from pdd.config.load import KvEventAddresses, agent_socket, kv_event_addresses, load_config
from pdd.core.errors import ConfigurationError

GOOD = """
run_dir = "/run/pdd"
[model]
path = "m"
name = "m"
[kv]
block_size_tokens = 64
blocks_per_chunk = 2
[policy]
assumed_wan_rate = "200mbit"
[[engines]]
id = "p0"
role = "prefill"
port = 1001
data_port = 1002
control_port = 1003
store_bytes = "2GiB"
[[links]]
rate = "200mbit"
delay = "15ms"
[[links.forwards]]
listen = "127.0.0.1:2001"
target = "[::1]:1002"
"""


def load(tmp_path: Path, text: str, **environ: str) -> object:
    path = tmp_path / "pdd.toml"
    path.write_text(text)
    return load_config(path, environ=environ)


def test_quantities_become_base_units(tmp_path: Path) -> None:
    path = tmp_path / "pdd.toml"
    path.write_text(GOOD)
    config = load_config(path, environ={})
    assert config.links[0].rate == 25e6
    assert config.links[0].delay == 0.015
    assert config.engines[0].store_bytes == 2 * 2**30
    assert config.policy.assumed_wan_rate == 25e6
    assert config.kv.chunk_tokens == 128
    assert config.engines[0].data_address == "127.0.0.1:1002"
    assert config.engines[0].url == "http://127.0.0.1:1001"
    assert agent_socket(config, "p0") == Path("/run/pdd/p0.sock")


def test_the_environment_lies_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pdd.toml"
    path.write_text(GOOD)
    environ = {
        "PDD_ROUTER__PORT": "8001",
        "PDD_ROUTER__API_KEYS": '["a", "b"]',
        "PDD_KV__BLOCKS_PER_CHUNK": "4",
        "PDD_MODEL__NAME": "other",
        "PDD_LAUNCH_ID": "not a key",
    }
    config = load_config(path, environ=environ)
    assert config.router.port == 8001
    assert config.router.api_keys == ("a", "b")
    assert config.kv.blocks_per_chunk == 4
    assert config.model.name == "other"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[model]", "[modell]"), ["model: required key is missing", "modell: unknown key"]),
        (('rate = "200mbit"\nd', 'rate = "fast"\nd'), ["links[0].rate: 'fast' is not a rate", "200mbit"]),
        (('delay = "15ms"', "delay = -1"), ["links[0].delay", "greater than or equal to 0"]),
        (("port = 1001", "port = 70000"), ["engines[0].port", "less than or equal to 65535", "70000"]),
        (('role = "prefill"', 'role = "decode"'), ["engines[0].role", "'prefill', 'relay' or 'main'"]),
        (('id = "p0"', 'id = "P 0"'), ["engines[0].id", "'P 0'"]),
        (('"2GiB"', '"2 gigs"'), ["engines[0].store_bytes: '2 gigs' is not a size"]),
        (('listen = "127.0.0.1:2001"', 'listen = "2001"'), ["links[0].forwards[0].listen"]),
        (("[kv]", "[kv"), ["is not valid TOML", "line"]),
        (
            ("control_port = 1003", "control_port = 1001"),
            ["engines[0]: port 1001 of p0 is asked for twice, by port and by control_port"],
        ),
        (
            ("control_port = 1003", "control_port = 1003\nevents_port = 1000"),
            ["port 1001 of p0 is asked for twice, by port and by events_port + 1"],
        ),
        (
            ("control_port = 1003", "control_port = 1003\nevents_port = 65535"),
            ["engines[0].events_port", "less than or equal to 65534"],
        ),
    ],
)
def test_a_wrong_file_is_named_with_the_key_and_what_was_expected(
    tmp_path: Path, change: tuple[str, str], words: list[str]
) -> None:
    assert change[0] in GOOD
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, GOOD.replace(*change))
    assert str(tmp_path / "pdd.toml") in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pdd.toml"
    path.write_bytes(b"# Z\xfcrich\n" + GOOD.encode())
    with pytest.raises(ConfigurationError, match=r"pdd\.toml is not UTF-8: .* at byte 3"):
        load_config(path, environ={})


def test_a_list_of_wrong_items_is_not_called_too_short_as_well(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, GOOD.replace('role = "prefill"', 'role = "decode"'))
    assert "at least 1 item" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"engines: .*at least 1 item"):
        load(tmp_path, "engines = []\n" + GOOD[: GOOD.index("[[engines]]")])


def test_two_engines_of_one_id_are_named(tmp_path: Path) -> None:
    engine = GOOD[GOOD.index("[[engines]]") : GOOD.index("[[links]]")]
    with pytest.raises(ConfigurationError, match="engine ids must be unique, but p0 occurs twice"):
        load(tmp_path, GOOD + engine)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*none.toml: No such file"):
        load_config(tmp_path / "none.toml")


def test_kv_events_are_on_sockets_beside_the_agents_or_on_ports(tmp_path: Path) -> None:
    def addresses(**engine: object) -> KvEventAddresses:
        lines = "\n".join(f"{key} = {value!r}" for key, value in engine.items())
        config = load_config(write(tmp_path, GOOD.replace('id = "p0"', f'id = "p0"\n{lines}')), environ={})
        return kv_event_addresses(config.engines[0], agent_socket=agent_socket(config, "p0"))

    def write(folder: Path, text: str) -> Path:
        path = folder / "pdd.toml"
        path.write_text(text)
        return path

    near = addresses()
    assert (near.publish, near.follow) == ("ipc:///run/pdd/p0.kv",) * 2
    assert near.follow_replay == "ipc:///run/pdd/p0.kvr"
    assert addresses(host="10.1.2.3").follow is None
    far = addresses(host="10.1.2.3", events_port=5557, url="http://md.example:8000")
    assert far.publish == "tcp://[::ffff:10.1.2.3]:5557"
    assert far.publish_replay == "tcp://[::ffff:10.1.2.3]:5558"
    assert (far.follow, far.follow_replay) == ("tcp://md.example:5557", "tcp://md.example:5558")
    assert addresses(host="0.0.0.0", events_port=5557).publish == "tcp://*:5557"
    v6 = addresses(host="::1", events_port=5557)
    assert (v6.publish, v6.follow) == ("tcp://*:5557", "tcp://[::1]:5557")
