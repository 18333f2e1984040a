"""The table of reported faults names tests that exist, and leaves no row of its sections out."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reference" / "cases.md").read_text(encoding="utf-8")
HANDOFF = {39, 42, 43, 44, 45, 46}
CRASH = {52, 53, 55, 56, 57}
CANCELLATION = {59, 60, 62, 63}
ROUTER = {64, 66, 68, 70, 71, 72, 73}
API = {76, 77, 78, 80, 81, 82}
PREFIX_CACHE = {83, 85}
METRICS = {89, 90, 91, 93}
ROUTERS_PART_OF_ADDRESSES = {97, 99, 100}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    functions: dict[str, set[str]] = {}
    for path, name in named:
        if path not in functions:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            functions[path] = {node.name for node in tree.body if isinstance(node, kinds)}
        assert name in functions[path], f"{path} has no {name}"


def test_every_row_of_the_list_is_answered() -> None:
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    sections = (HANDOFF, CRASH, CANCELLATION, ROUTER, API, PREFIX_CACHE, METRICS)
    assert rows == set().union(*sections, ROUTERS_PART_OF_ADDRESSES)
