"""The configuration page says what the schema says."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "tools" / "config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_schema_says(generator: ModuleType) -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.render(), "run tools/config_reference.py"


def test_every_key_is_explained(generator: ModuleType) -> None:
    for line in generator.render().splitlines():
        if line.startswith("| `"):
            assert line.split(" | ")[2].strip(" |"), line
