"""Which transport carries what, and what is refused."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from pdd.config.schema import PddConfig
from pdd.core.errors import ConfigurationError
from pdd.transport.choice import choose_transport
from pdd.transport.nixl import NixlTransport
from pdd.transport.nixl_endpoint import missing
from pdd.transport.tcp import TcpTransport

WHY_NOT = missing()
SITES = {"p0": "a", "rld0": "a", "md0": "b"}


def config(*, fast: str = "nixl", tls: str = "auto", more: dict[str, str] | None = None) -> PddConfig:
    roles = {"p": "prefill", "rld": "relay", "md": "main"}
    engines: list[dict[str, Any]] = [
        {
            "id": engine_id,
            "role": roles[engine_id.rstrip("0123456789")],
            "site": site,
            "port": 1,
            "data_port": 100 + at,
            "control_port": 200 + at,
        }
        for at, (engine_id, site) in enumerate({**SITES, **(more or {})}.items())
    ]
    return PddConfig.model_validate(
        {
            "model": {"path": "none", "name": "none"},
            "agent": {"fast_transport": fast},
            "tls": {"mode": tls},
            "engines": engines,
        }
    )


def nixl_engines(given: PddConfig) -> set[str]:
    return {engine.id for engine in given.engines if given.uses_nixl(engine)}


def test_nixl_carries_only_what_stays_within_a_site() -> None:
    assert nixl_engines(config()) == {"rld0"}
    assert nixl_engines(config(fast="tcp")) == set()


def test_a_port_that_another_site_pushes_to_stays_tcp() -> None:
    assert nixl_engines(config(more={"p1": "b"})) == set()
    assert nixl_engines(config(more={"p1": "a", "md1": "a"})) == {"rld0", "md1"}


def test_it_is_not_chosen_against_the_wish_to_encrypt() -> None:
    with pytest.raises(ValidationError, match="in clear"):
        config(tls="on")


def test_engines_that_do_not_use_it_do_not_need_it() -> None:
    assert isinstance(choose_transport(config(), "md0"), TcpTransport)


@pytest.mark.skipif(WHY_NOT is None, reason="NIXL is installed")
@pytest.mark.parametrize("engine_id", ["p0", "rld0"])
def test_without_nixl_the_key_and_the_extra_are_named(engine_id: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape("agent.fast_transport") + ".*extra 'nixl'"):
        choose_transport(config(), engine_id)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_with_nixl_both_ends_choose_it() -> None:
    given = config()
    for engine_id in ("p0", "rld0"):
        transport = choose_transport(given, engine_id)
        listening = transport.listen("127.0.0.1:0")
        listening.close()
        assert not isinstance(transport, NixlTransport | TcpTransport)
