"""Reads and writes the quantities people type: rates, durations and sizes.

Inside PDD everything is seconds, bytes and bytes per second; these functions are the only place where
other units exist.
"""

import re

_NUMBER = r"(?P<number>\d+(?:\.\d+)?)"
_RATE_UNITS_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SIZE_UNITS_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def _parse(text: str, units: dict[str, float] | dict[str, int], *, what: str, example: str) -> float:
    match = re.fullmatch(_NUMBER + r"\s*(?P<unit>[a-z]+)", text.strip().lower())
    if match is None or match["unit"] not in units:
        raise ValueError(
            f"{text!r} is not a {what}: expected a number and one of {', '.join(units)}, as in {example!r}"
        )
    return float(match["number"]) * units[match["unit"]]


def parse_rate_bytes_per_s(text: str) -> float:
    """Bytes per second of a line rate such as ``200mbit`` (decimal, as tc writes it).

    Raises:
        ValueError: If the text is no number with a known unit.
    """
    return _parse(text, _RATE_UNITS_BITS, what="rate", example="200mbit") / 8


def parse_duration_s(text: str) -> float:
    """Seconds of a duration such as ``15ms``.

    Raises:
        ValueError: If the text is no number with a known unit.
    """
    return _parse(text, _TIME_UNITS_S, what="duration", example="15ms")


def parse_size_bytes(text: str) -> int:
    """Bytes of a size such as ``512MiB`` (binary) or ``1GB`` (decimal).

    Raises:
        ValueError: If the text is no number with a known unit.
    """
    return round(_parse(text, _SIZE_UNITS_BYTES, what="size", example="512MiB"))


def parse_ratio(text: str) -> float:
    """A share as a ratio: ``0.01%`` or ``0.0001``.

    Raises:
        ValueError: If the text is neither, or not between 0 and 1.
    """
    number, is_percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    if re.fullmatch(_NUMBER, number) is None:
        raise ValueError(f"{text!r} is not a share: expected a number, as in '0.01%'")
    ratio = float(number) / (100 if is_percent else 1)
    if ratio > 1:
        raise ValueError(f"{text!r} is more than all")
    return ratio


def format_bytes(num_bytes: float) -> str:
    """A size for people, decimal as network figures are: ``46.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def format_duration_s(seconds: float) -> str:
    """A duration for people: ``850 ms`` or ``3.2 s``."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
