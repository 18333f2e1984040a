"""The link's page names every setting, call and part of the bench that there is."""

import inspect
import re
from pathlib import Path

import pytest

from pdd.cli.link import SETTINGS
from pdd.link.bench import run
from pdd.link.bench.command import PARTS

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "link.md").read_text(encoding="utf-8")
FIGURES = re.findall(r'bench\.put\("(\w+_ratio|cpu_\w+|memory_\w+)"', inspect.getsource(run))


@pytest.mark.parametrize("name", [*SETTINGS, *PARTS, *FIGURES])
def test_it_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("call", ["state", "set", "hold", "cut", "resume"])
def test_calls_are_on_the_page(call: str) -> None:
    assert re.search(rf"`(GET|POST) /{call}\b", PAGE)
