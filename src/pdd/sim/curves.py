"""Engine time from measured curves instead of the roofline: CSV files as ``vllm bench`` output reduces to.

Owns the CSV format: prefill ``query_tokens,cached_tokens,seconds``; decode
``batch,context_tokens,step_seconds``, where
``context_tokens`` is per request. Times between points are bilinear, beyond the last point linear from the
last two.
"""

import csv
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from pdd.core.errors import ConfigurationError

Point = tuple[float, float, float]


class Surface:
    """Seconds over a grid of two quantities; the grid must be full."""

    def __init__(self, points: Sequence[Point], *, source: str) -> None:
        self._xs = sorted({point[0] for point in points})
        self._ys = sorted({point[1] for point in points})
        self._values = {(x, y): value for x, y, value in points}
        missing = [(x, y) for x in self._xs for y in self._ys if (x, y) not in self._values]
        if missing:
            raise ConfigurationError(
                f"{source}: the grid has no row for {missing[0][0]:g},{missing[0][1]:g}; expected every pair"
            )

    def at(self, x: float, y: float) -> float:
        """Seconds at a point, never below zero."""
        x0, x1, fx = _bracket(self._xs, x)
        y0, y1, fy = _bracket(self._ys, y)
        low = self._values[x0, y0] * (1 - fy) + self._values[x0, y1] * fy
        high = self._values[x1, y0] * (1 - fy) + self._values[x1, y1] * fy
        return max(0.0, low * (1 - fx) + high * fx)


def _bracket(grid: Sequence[float], at: float) -> tuple[float, float, float]:
    if len(grid) == 1:
        return grid[0], grid[0], 0.0
    index = min(max(bisect_right(grid, at) - 1, 0), len(grid) - 2)
    low, high = grid[index], grid[index + 1]
    return low, high, max(0.0, (at - low) / (high - low))


def read_surface(path: Path, columns: tuple[str, str, str]) -> Surface:
    """The surface of a CSV file with exactly those columns.

    Raises:
        ConfigurationError: Naming the file, the line and what was expected.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            if tuple(name.strip() for name in header) != columns:
                raise ConfigurationError(
                    f"{path}, line 1: expected the header {','.join(columns)}, got {','.join(header)!r}"
                )
            points = [_point(row, path, line) for line, row in enumerate(reader, start=2) if row]
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    if not points:
        raise ConfigurationError(f"{path}: expected at least one row of numbers below the header")
    return Surface(points, source=str(path))


def _point(row: Sequence[str], path: Path, line: int) -> Point:
    try:
        x, y, value = (float(text) for text in row)
    except ValueError:
        raise ConfigurationError(
            f"{path}, line {line}: expected three numbers, got {','.join(row)!r}"
        ) from None
    if x < 0 or y < 0 or value <= 0:
        raise ConfigurationError(
            f"{path}, line {line}: expected quantities >= 0 and a time > 0, got {','.join(row)!r}"
        )
    return x, y, value
