"""The table of chips: what each can do, what it costs, and which role that suits.

Owns ``data/chips.toml`` and its rules. The four dimensions are compute, memory capacity, memory bandwidth,
interconnect.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdd.core.errors import ConfigurationError
from pdd.sim.messages import explain_validation


class _ChipRow(BaseModel):
    """One table of the file, in data-sheet units."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bf16_tflops: float = Field(gt=0)
    fp8_tflops: float | None = Field(default=None, gt=0)
    hbm_gb: float = Field(gt=0)
    hbm_tb_per_s: float = Field(gt=0)
    link_gb_per_s: float = Field(ge=0)
    host_gb_per_s: float = Field(gt=0)
    price_per_hour_low: float | None = Field(default=None, gt=0)
    price_per_hour_high: float | None = Field(default=None, gt=0)
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator, in SI units.

    Args:
        name: Key in the table.
        bf16_flops_per_s: Dense peak.
        fp8_flops_per_s: Dense peak; equal to bf16 where the chip has no fp8.
        hbm_bytes: Device memory.
        hbm_bytes_per_s: Its bandwidth.
        link_bytes_per_s: One way, to the other chips of its engine; 0 if unknown.
        host_bytes_per_s: One way, to host memory.
        price_per_hour: Middle of the prices seen; None if none was.
        source: Where the figures come from.
    """

    name: str
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    price_per_hour: float | None
    source: str


def load_chips(path: Path | None = None) -> dict[str, Chip]:
    """The chips of a table, the bundled one by default.

    Raises:
        ConfigurationError: Naming the file, the chip, the key and what was expected.
    """
    source = str(path) if path else "the bundled chips.toml"
    try:
        text = path.read_text(encoding="utf-8") if path else _bundled_text()
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"cannot read {source}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{source} is not valid TOML: {error}") from error
    if not tables:
        raise ConfigurationError(f"{source} holds no chip; expected one table a chip, as [H100-SXM]")
    return {name: _chip(name, table, source) for name, table in tables.items()}


def _bundled_text() -> str:
    return (resources.files("pdd.sim") / "data" / "chips.toml").read_text(encoding="utf-8")


def _chip(name: str, table: object, source: str) -> Chip:
    try:
        row = _ChipRow.model_validate(table)
    except ValidationError as error:
        raise ConfigurationError(
            explain_validation(error, source=f"{source}, [{name}]", what="chip")
        ) from error
    prices = [price for price in (row.price_per_hour_low, row.price_per_hour_high) if price is not None]
    return Chip(
        name=name,
        bf16_flops_per_s=row.bf16_tflops * 1e12,
        fp8_flops_per_s=(row.fp8_tflops or row.bf16_tflops) * 1e12,
        hbm_bytes=row.hbm_gb * 1e9,
        hbm_bytes_per_s=row.hbm_tb_per_s * 1e12,
        link_bytes_per_s=row.link_gb_per_s * 1e9,
        host_bytes_per_s=row.host_gb_per_s * 1e9,
        price_per_hour=sum(prices) / len(prices) if prices else None,
        source=row.source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipRating:
    """A chip's four dimensions relative to a reference chip, and the role they suit.

    Args:
        chip: The chip.
        compute_ratio, capacity_ratio, bandwidth_ratio, link_ratio: Against the reference chip.
        flops_per_byte: Compute peak over memory bandwidth: high suits prefill, low suits decode.
        prefill_value, decode_value: Compute, and bandwidth, bought by one unit of money; None without a
            price.
        role: ``prefill``, ``main`` or ``either``.
        reason: Why.
    """

    chip: Chip
    compute_ratio: float
    capacity_ratio: float
    bandwidth_ratio: float
    link_ratio: float
    flops_per_byte: float
    prefill_value: float | None
    decode_value: float | None
    role: str
    reason: str


def rate_chips(chips: dict[str, Chip], *, reference: str) -> list[ChipRating]:
    """Every chip rated against a reference, by name order.

    A chip suits prefill if it is relatively richer in compute than in bandwidth, and main decode the other
    way round; within ``EITHER_BAND`` of the reference's own balance it suits either.

    Raises:
        ConfigurationError: If the reference is not in the table.
    """
    if reference not in chips:
        raise ConfigurationError(
            f"chip {reference!r} is not in the table; expected one of {', '.join(sorted(chips))}"
        )
    base = chips[reference]
    return [_rating(chips[name], base) for name in sorted(chips)]


EITHER_BAND = 0.15
"""Balances within so much of the reference do not decide a role by themselves."""


def _rating(chip: Chip, base: Chip) -> ChipRating:
    balance = chip.fp8_flops_per_s / chip.hbm_bytes_per_s
    relative = balance / (base.fp8_flops_per_s / base.hbm_bytes_per_s)
    if relative > 1 + EITHER_BAND:
        role, reason = "prefill", f"{relative:.2f} times the reference's compute per byte of bandwidth"
    elif relative < 1 - EITHER_BAND:
        role, reason = "main", f"{1 / relative:.2f} times the reference's bandwidth per unit of compute"
    else:
        role, reason = "either", "compute and bandwidth balanced as in the reference"
    price = chip.price_per_hour
    return ChipRating(
        chip=chip,
        compute_ratio=chip.fp8_flops_per_s / base.fp8_flops_per_s,
        capacity_ratio=chip.hbm_bytes / base.hbm_bytes,
        bandwidth_ratio=chip.hbm_bytes_per_s / base.hbm_bytes_per_s,
        link_ratio=chip.link_bytes_per_s / base.link_bytes_per_s if base.link_bytes_per_s else 0.0,
        flops_per_byte=balance,
        prefill_value=chip.fp8_flops_per_s / price / 1e15 if price else None,
        decode_value=chip.hbm_bytes_per_s / price / 1e12 if price else None,
        role=role,
        reason=reason,
    )
