"""Reads ``pdd.toml`` and says what is wrong with it in the operator's terms.

Precedence: default < file < environment < flag. ``PDD_ROUTER__PORT=8001`` sets ``router.port``.
"""

import ipaddress
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from pdd.config.schema import EngineConfig, PddConfig, is_loopback
from pdd.core.errors import ConfigurationError

ENV_PREFIX = "PDD_"
ENV_SECTIONS = ("MODEL", "KV", "AGENT", "TLS", "ROUTER", "POLICY")
TLS_FILES = ("cert", "key", "ca")


def load_config(path: Path, *, environ: Mapping[str, str] | None = None) -> PddConfig:
    """The validated configuration of a file, with the environment laid over it.

    Raises:
        ConfigurationError: Naming the file, each wrong key and what was expected there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    config = parse_config(values, source=str(path), environ=os.environ if environ is None else environ)
    files = {name: str(path.absolute().parent / getattr(config.tls, name)) for name in TLS_FILES}
    return config.model_copy(update={"tls": config.tls.model_copy(update=files)})


def parse_config(values: dict[str, Any], *, source: str, environ: Mapping[str, str]) -> PddConfig:
    """As ``load_config``, from values already read; ``source`` names them in messages."""
    _lay_environment_over(values, environ)
    try:
        return PddConfig.model_validate(values)
    except ValidationError as error:
        items: list[dict[str, Any]] = [dict(item) for item in error.errors()]
        problems = "\n".join(
            f"  {_location(item['loc'])}: {_explain(item)}" for item in items if not _follows(item, items)
        )
        raise ConfigurationError(f"{source} is not a valid configuration:\n{problems}") from error


def _lay_environment_over(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    for name, text in environ.items():
        section, separator, key = name.removeprefix(ENV_PREFIX).partition("__")
        if not (name.startswith(ENV_PREFIX) and separator and section in ENV_SECTIONS):
            continue
        target = values.setdefault(section.lower(), {})
        if isinstance(target, dict):
            target[key.lower()] = _env_value(text)


def _env_value(text: str) -> Any:
    """Lists and objects are written as JSON; everything else is left to the schema."""
    if text[:1] in "[{":
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _follows(item: dict[str, Any], items: list[dict[str, Any]]) -> bool:
    """Whether a list is only called too short because its items are wrong, each of which is named already."""
    depth = len(item["loc"])
    return item["type"] == "too_short" and any(
        len(other["loc"]) > depth and other["loc"][:depth] == item["loc"] for other in items
    )


def _location(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "(whole file)"


def _explain(item: dict[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown key"
    if item["type"] == "missing":
        return "required key is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    value = item.get("input")
    return message if isinstance(value, dict | list | PddConfig) else f"{message} (got {value!r})"


def default_run_dir(config: PddConfig) -> Path:
    """The folder of sockets and logs."""
    if config.run_dir:
        return Path(config.run_dir)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "pdd" if base else Path(f"/tmp/pdd-{os.getuid()}")  # noqa: S108  # per user, made 0700


def parse_socket(config: PddConfig) -> Path:
    """The Unix socket between the router and the process that parses its answers.

    Routers that share the folder have a port each, and so a socket each.
    """
    return default_run_dir(config) / f"parser-{config.router.port}.sock"


def agent_socket(config: PddConfig, engine_id: str) -> Path:
    """The Unix socket between an engine and its agent."""
    return default_run_dir(config) / f"{engine_id}.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventAddresses:
    """Where an engine says what its caches hold, as ZeroMQ writes addresses.

    Args:
        publish: What the engine binds.
        publish_replay: What it binds to repeat batches.
        follow: Where a router finds it; None if it cannot.
        follow_replay: Where a router asks for a repetition.
    """

    publish: str
    publish_replay: str
    follow: str | None
    follow_replay: str | None


def kv_event_addresses(engine: EngineConfig, *, agent_socket: Path) -> KvEventAddresses:
    """The addresses of an engine's KV events: its ports, or else Unix sockets beside its agent's.

    Source:
        vllm/distributed/kv_events.py@0.32.0 (``ZmqEventPublisher``): it binds only addresses with ``*`` or
        ``::`` in them and connects to others; the mapped form of an IPv4 address is one it binds.
    """
    if engine.events_port is None:
        # No longer than the agent's: what one system call takes, the other does.
        own, replay = (f"ipc://{agent_socket.with_suffix(end)}" for end in (".kv", ".kvr"))
        near = is_loopback(engine.host)
        return KvEventAddresses(
            publish=own,
            publish_replay=replay,
            follow=own if near else None,
            follow_replay=replay if near else None,
        )
    is_one = _is_ipv4(engine.host) and not ipaddress.ip_address(engine.host).is_unspecified
    host = f"[::ffff:{engine.host}]" if is_one else "*"
    reached = urlsplit(engine.url).hostname or engine.host
    reached = f"[{reached}]" if ":" in reached else reached
    ports = engine.events_port, engine.events_port + 1
    published = [f"tcp://{host}:{port}" for port in ports]
    followed = [f"tcp://{reached}:{port}" for port in ports]
    return KvEventAddresses(
        publish=published[0],
        publish_replay=published[1],
        follow=followed[0],
        follow_replay=followed[1],
    )


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4
    except ValueError:
        return False
