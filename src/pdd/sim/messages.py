"""Says what is wrong with a file in its writer's terms."""

from pydantic import ValidationError


def explain_validation(error: ValidationError, *, source: str, what: str) -> str:
    """A message that names the source, each wrong key and what was expected there."""
    lines = [
        f"  {_location(item['loc'])}: {_explain(item['type'], item['msg'], item.get('input'))}"
        for item in error.errors()
    ]
    return f"{source} is not a valid {what}:\n" + "\n".join(lines)


def _location(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "(whole file)"


def _explain(kind: str, message: str, value: object) -> str:
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "missing":
        return "required key is missing"
    message = message.removeprefix("Value error, ")
    return message if isinstance(value, dict | list) else f"{message} (got {value!r})"
