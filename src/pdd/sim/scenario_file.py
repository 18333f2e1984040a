"""Reads a scenario file: every mistake in it is named with its key and what was expected there."""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pdd.core.errors import ConfigurationError
from pdd.sim.messages import explain_validation
from pdd.sim.scenario import Scenario


def load_scenario(path: Path, *, overrides: tuple[str, ...] = ()) -> Scenario:
    """The checked scenario of a file.

    Args:
        path: TOML.
        overrides: ``section.key=value`` texts laid over the file, values in TOML.

    Raises:
        ConfigurationError: Naming the file, each wrong key and what was expected there.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _lay_over(values, override)
    return parse_scenario(values, source=str(path), base=path.parent)


def parse_scenario(values: dict[str, Any], *, source: str, base: Path) -> Scenario:
    """As ``load_scenario``, from values already read; paths are taken relative to ``base``."""
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(explain_validation(error, source=source, what="scenario")) from error
    update: dict[str, Any] = {}
    if scenario.workload.path:
        update["workload"] = scenario.workload.model_copy(
            update={"path": _absolute(scenario.workload.path, base)}
        )
    if scenario.chips:
        update["chips"] = _absolute(scenario.chips, base)
    return scenario.model_copy(update=update)


def _absolute(path: str, base: Path) -> str:
    return path if Path(path).is_absolute() else str(base / path)


def _lay_over(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigurationError(
            f"--set {override!r}: expected section.key=value, as in line.rate='\"50gbit\"'"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    target = values
    *sections, last = key.strip().split(".")
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigurationError(f"--set {override!r}: {section} is not a section")
    target[last] = value
