"""Writes docs/reference/configuration.md from the schema, so that the page cannot say anything else.

Run it after a change of src/pdd/config/schema.py; a test compares the page with what this would write::

    .venv/bin/python tools/config_reference.py
"""

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from pdd.config import schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "configuration.md"

SECTIONS = (
    ("", schema.PddConfig),
    ("model", schema.ModelConfig),
    ("kv", schema.KvConfig),
    ("engines", schema.EngineConfig),
    ("agent", schema.AgentConfig),
    ("tls", schema.TlsConfig),
    ("router", schema.RouterConfig),
    ("policy", schema.PolicyConfig),
    ("links", schema.LinkConfig),
    ("links.forwards", schema.ForwardConfig),
)
LISTS = {"engines", "links", "links.forwards"}
DURATION_KEYS = ("_s", "delay")

HEAD = """# Configuration

One TOML file describes a whole deployment; every program reads the same one. An unknown key is an error. This
page is written by `tools/config_reference.py` from `src/pdd/config/schema.py`.

Quantities may be numbers in base units or text with a unit: rates `"200mbit"` (bit/s, decimal; a number is
bytes per second), durations `"15ms"` (a number is seconds), sizes `"2GiB"` or `"1GB"` (a number is bytes).

Precedence: default < file < environment < flag. The environment sets single keys of `model`, `kv`, `agent`,
`tls`, `router` and `policy`: `PDD_ROUTER__PORT=8001` is `router.port`. Lists are written as JSON:
`PDD_ROUTER__API_KEYS='["secret"]'`.
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(_section(path, model) for path, model in SECTIONS)


def _section(path: str, model: type[schema.Section]) -> str:
    brackets = f"[[{path}]]" if path in LISTS else f"[{path}]"
    title = f"`{brackets}`" if path else "Top level"
    meanings = field_docstrings(model)
    rows = [
        f"| `{name}` | {_default(name, field)} | {meanings.get(name, '')} |"
        for name, field in model.model_fields.items()
        if not _is_section(path, name)
    ]
    about = inspect.cleandoc(model.__doc__ or "")
    table = "| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    return f"\n## {title}\n\n{about}\n\n{table}"


def field_docstrings(model: type[schema.Section]) -> dict[str, str]:
    """Field name to the string under its definition, as one line."""
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = (
                " ".join(str(text.value.value).split()).replace("``", "`").replace("|", "\\|")
            )
    return found


def _is_section(path: str, name: str) -> bool:
    full = f"{path}.{name}" if path else name
    return full in {section for section, _ in SECTIONS}


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None or value in ("", (), {}):
        return "-"
    if name.endswith("_bytes"):
        return f"`{_size(value)}`"
    if name.endswith(DURATION_KEYS):
        return f"`{value:g}s`"
    if name.endswith("_rate"):
        return f"`{value * 8 / 1e6:g}mbit`"
    return f"`{value}`"


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def main() -> int:
    """The page says what the schema says."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
