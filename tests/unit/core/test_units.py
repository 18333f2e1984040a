"""Quantities people type become bytes and seconds, or a message that says what was expected."""

import pytest

from pdd.core.units import (
    format_bytes,
    format_duration_s,
    parse_duration_s,
    parse_rate_bytes_per_s,
    parse_ratio,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("8bit", 1.0), ("200mbit", 25e6), ("1gbit", 125e6), ("2.5 Gbit", 312.5e6), ("64kbit", 8e3)],
)
def test_rates_are_decimal_bits(text: str, bytes_per_s: float) -> None:
    assert parse_rate_bytes_per_s(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    ("text", "seconds"), [("15ms", 0.015), ("2s", 2.0), ("250us", 250e-6), ("1min", 60.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("512MiB", 2**29), ("1GB", 10**9), ("3b", 3), ("2TiB", 2**41)]
)
def test_sizes_tell_binary_from_decimal(text: str, num_bytes: int) -> None:
    assert parse_size_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "fast", "200", "-1mbit", "200 mbits", "1e3mbit", "mbit"])
def test_a_wrong_quantity_says_what_was_expected(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"is not a rate: expected a number and one of bit, kbit, mbit, gbit"
    ):
        parse_rate_bytes_per_s(text)


@pytest.mark.parametrize(("text", "ratio"), [("0.01%", 1e-4), ("0.0001", 1e-4), ("10 %", 0.1), ("0", 0.0)])
def test_shares(text: str, ratio: float) -> None:
    assert parse_ratio(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["", "some", "-1%", "101%", "1.5"])
def test_a_wrong_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a share|is more than all"):
        parse_ratio(text)


def test_figures_for_people() -> None:
    assert [format_bytes(n) for n in (0, 999, 46_080, 5.9e6, 2.4e9, 3e12)] == [
        "0 B", "999 B", "46.1 kB", "5.9 MB", "2.4 GB", "3000.0 GB",
    ]  # fmt: skip
    assert [format_duration_s(s) for s in (0.0149, 0.85, 3.21)] == ["15 ms", "850 ms", "3.2 s"]
