"""Prints the tables of ``docs/reference/scenario.md`` from the schema: page and code cannot differ."""

import ast
import inspect
import sys
from types import ModuleType

from pydantic_core import PydanticUndefined

from pdd.sim import scenario
from pdd.sim.scenario import Scenario, Section


def _docs(module: ModuleType) -> dict[tuple[str, str], str]:
    """Docstrings below fields, by class and field name."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        field = ""
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                field = item.target.id
            elif isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and field:
                found[node.name, field] = " ".join(str(item.value.value).split())
                field = ""
    return found


def reference() -> str:
    """The tables, one a section, in the file's order."""
    docs = _docs(scenario)
    sections = [
        value for value in vars(scenario).values() if inspect.isclass(value) and issubclass(value, Section)
    ]
    parts = []
    for section in sections:
        if section is Section:
            continue
        name = next(
            (
                key
                for key, field in Scenario.model_fields.items()
                if section.__name__ in str(field.annotation)
            ),
            "fleet.prefill, relay, main, local_prefill" if section.__name__ == "RoleSection" else "(top)",
        )
        rows = [
            f"## `{name}`",
            "",
            (section.__doc__ or "").split("\n", 1)[0],
            "",
            "| key | default | meaning |",
            "|---|---|---|",
        ]
        for key, field in section.model_fields.items():
            default = "required" if field.default is PydanticUndefined else f"`{field.default!r}`"
            if isinstance(field.default, Section):
                default = "see there"
            rows.append(f"| `{key}` | {default} | {docs.get((section.__name__, key), '')} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference() + "\n")
