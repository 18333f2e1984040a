"""The page of acceptance cases names tests that exist, and every case."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "cases-wan.md"
CASES = {
    *("01", "03", "04", "06", "08", "09", "10", "12"),
    *("15", "16", "17", "19", "20", "21", "23", "24", "25"),
    *("28", "30", "32", "33", "35", "36", "37"),
    *("94", "95", "97", "99", "100"),
}


def named_tests() -> list[str]:
    return sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE.read_text(encoding="utf-8"))))


def test_every_case_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| .{20,} \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(CASES)


@pytest.mark.parametrize("name", named_tests())
def test_a_named_test_exists(name: str) -> None:
    path, *parts = name.split("::")
    scope: ast.AST = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for part in parts:
        found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == part]
        assert found, f"{path} has no {part}"
        scope = found[0]
