"""The reference page says what the schema says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_holds_the_schemas_tables() -> None:
    reference = runpy.run_path(str(ROOT / "tools" / "scenario_reference.py"))["reference"]
    assert reference() in (ROOT / "docs" / "reference" / "scenario.md").read_text()
