"""The pages of acceptance cases name tests that exist, and answer every case of theirs."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANDOFF = {39, 42, 43, 44, 45, 46}
CRASH = {52, 53, 55, 56, 57}
CANCELLATION = {59, 60, 62, 63}
ROUTER = {64, 66, 68, 70, 71, 72, 73}
API = {76, 77, 78, 80, 81, 82}
PREFIX_CACHE = {83, 85}
METRICS = {89, 90, 91, 93}
ADDRESSES = {97, 99, 100}
CASES = {
    "cases.md": HANDOFF | CRASH | CANCELLATION | ROUTER | API | PREFIX_CACHE | METRICS | ADDRESSES,
    "cases-wan.md": {1, 3, 4, 6, 8, 9, 10, 12}
    | {15, 16, 17, 19, 20, 21, 23, 24, 25}
    | {28, 30, 32, 33, 35, 36, 37}
    | {94, 95}
    | ADDRESSES,
}


def text_of(page: str) -> str:
    """The page."""
    return (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")


@cache
def tree_of(path: str) -> ast.AST:
    """The module of a test file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", CASES)
def test_every_case_is_answered_once(page: str) -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| .{20,} \|$", text_of(page), re.MULTILINE)
    assert sorted(map(int, rows)) == sorted(CASES[page])


@pytest.mark.parametrize("page", CASES)
def test_every_test_that_is_named_exists(page: str) -> None:
    named = sorted(set(re.findall(r"`(tests/[^`]+)`", text_of(page))))
    assert len(named) > 20
    for name in named:
        path, *parts = name.split("::")
        scope = tree_of(path)
        for part in parts:
            found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == part]
            assert found, f"{path} has no {part}"
            scope = found[0]
