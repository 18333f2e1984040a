"""A result as one HTML file with plots drawn as SVG: opens in a browser without a network.

Owns the page. It draws what it is given and knows nothing of simulation.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import floor, log10
from pathlib import Path

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.2rem .8rem;border-bottom:1px solid #d5dde5}
td,th{text-align:right}
td:first-child,th:first-child{text-align:left}svg{background:#fff;border:1px solid #d5dde5}.note{color:#566}
"""
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
WIDTH, HEIGHT, MARGIN = 640, 300, 52
Position = Callable[[float, float], tuple[float, float]]


class Report:
    """Sections in the order they are added."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """A section begins."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """A paragraph of plain text."""
        self._parts.append(f"<p class=note>{escape(text)}</p>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table; numbers are shortened for people."""
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(show(cell))}</td>" for cell in row) + "</tr>" for row in rows
        )
        self._parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def curves(
        self, series: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str
    ) -> None:
        """Lines over a common axis."""
        points = [point for line in series.values() for point in line]
        if points:
            self._parts.append(_curves_svg(series, points, x_label, y_label))

    def bars(self, values: Mapping[str, float], *, y_label: str) -> None:
        """One bar a name."""
        if values:
            self._parts.append(_bars_svg(values, y_label))

    def write(self, path: Path) -> None:
        """Writes the page as a whole or not at all."""
        html = (
            f"<!doctype html><html lang=en><meta "
            f"charset=utf-8><title>{escape(self._title)}</title><style>{STYLE}</style>"
            f"<h1>{escape(self._title)}</h1>{''.join(self._parts)}</html>"
        )
        draft = path.with_name(path.name + ".part")
        draft.write_text(html, encoding="utf-8")
        draft.replace(path)


def show(value: object) -> str:
    """A value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, float):
        if value == 0 or 0.001 <= abs(value) < 1e6:
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        return f"{value:.3g}"
    return str(value)


def _ticks(low: float, high: float) -> list[float]:
    span = high - low or 1.0
    raw = span / 5
    unit = 10 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if raw <= unit * factor)
    first = floor(low / step) * step
    return [
        first + step * index
        for index in range(8)
        if low - step * 0.01 <= first + step * index <= high + step * 0.01
    ]


def _curves_svg(
    series: Mapping[str, Sequence[tuple[float, float]]],
    points: Sequence[tuple[float, float]],
    x_label: str,
    y_label: str,
) -> str:
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(0.0, min(y for _, y in points)), max(y for _, y in points) * 1.05 or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            MARGIN + (x - x_low) / (x_high - x_low or 1) * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN + 12 - (y - y_low) / (y_high - y_low) * (HEIGHT - 1.4 * MARGIN),
        )

    parts = [_axes(_ticks(x_low, x_high), _ticks(y_low, y_high), at, x_low, y_low, x_label, y_label)]
    for index, (name, line) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{18 + 15 * index}" text-anchor="end" fill="{colour}" '
            f'font-size="12">{escape(name)}</text>'
        )
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'


def _axes(
    xs: Sequence[float],
    ys: Sequence[float],
    at: Position,
    x_low: float,
    y_low: float,
    x_label: str,
    y_label: str,
) -> str:
    parts = []
    for x in xs:
        left, bottom = at(x, y_low)
        parts.append(
            f'<text x="{left:.0f}" y="{bottom + 15:.0f}" text-anchor="middle" font-size="11">{show(x)}</text>'
        )
    for y in ys:
        left, top = at(x_low, y)
        parts.append(
            f'<line x1="{left:.0f}" x2="{WIDTH - MARGIN}" y1="{top:.0f}" y2="{top:.0f}" stroke="#e5eaf0"/>'
        )
        parts.append(
            f'<text x="{left - 6:.0f}" y="{top + 4:.0f}" text-anchor="end" font-size="11">{show(y)}</text>'
        )
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle" font-size="12">{escape(x_label)}</text>'
    )
    parts.append(f'<text x="14" y="14" font-size="12">{escape(y_label)}</text>')
    return "".join(parts)


def _bars_svg(values: Mapping[str, float], y_label: str) -> str:
    top = max(values.values()) or 1.0
    width = (WIDTH - 2 * MARGIN) / len(values)
    parts = [f'<text x="14" y="14" font-size="12">{escape(y_label)}</text>']
    for index, (name, value) in enumerate(values.items()):
        height = value / top * (HEIGHT - 2 * MARGIN)
        left, base = MARGIN + index * width, HEIGHT - MARGIN
        parts.append(
            f'<rect x="{left + 4:.0f}" y="{base - height:.0f}" width="{width - 8:.0f}" '
            f'height="{height:.0f}" fill="{COLOURS[0]}"/>'
            f'<text x="{left + width / 2:.0f}" y="{base + 15}" text-anchor="middle" '
            f'font-size="11">{escape(name)}</text>'
            f'<text x="{left + width / 2:.0f}" y="{base - height - 4:.0f}" text-anchor="middle" '
            f'font-size="11">{show(value)}</text>'
        )
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'
