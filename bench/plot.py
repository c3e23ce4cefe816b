"""Line plots as plain SVG text: enough for a figure in the docs, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 240, 56, 40, 40
COLOURS: Final = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
NUM_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; `points` are (x, y), with x ascending."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes, both from 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def svg(panels: Sequence[Panel]) -> str:
    """Return one SVG document with all panels side by side."""
    width = len(panels) * (LEFT + WIDTH + GAP)
    height = TOP + HEIGHT + 2 * GAP
    size = f'width="{width}" height="{height}"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        body += _panel(panel, LEFT + index * (LEFT + WIDTH + GAP))
    return "\n".join([*body, "</svg>", ""])


def _panel(panel: Panel, left: int) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    x_max = max((x for x, _ in points), default=0.0) or 1.0
    y_max = max((y for _, y in points), default=0.0) * 1.05 or 1.0
    bottom = TOP + HEIGHT
    turned = f'transform="translate({left - 42},{TOP + HEIGHT / 2}) rotate(-90)"'
    parts = [
        _text(left + WIDTH / 2, TOP - 18, panel.title, bold=True),
        _text(left + WIDTH / 2, bottom + 34, panel.x_label),
        f'<text {turned} text-anchor="middle">{escape(panel.y_label)}</text>',
    ]
    for tick in range(NUM_TICKS + 1):
        share = tick / NUM_TICKS
        y, x = bottom - share * HEIGHT, left + share * WIDTH
        grid = f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>'
        parts += [grid, _text(left - 6, y + 4, f"{share * y_max:.3g}", anchor="end")]
        parts.append(_text(x, bottom + 16, f"{share * x_max:.3g}"))
    for index, line in enumerate(panel.lines):
        colour = COLOURS[index % len(COLOURS)]
        spots = [(left + x / x_max * WIDTH, bottom - y / y_max * HEIGHT) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        y = TOP + 8 + 16 * index
        parts.append(f'<rect x="{left + 8}" y="{y - 8}" width="14" height="3" fill="{colour}"/>')
        parts.append(_text(left + 28, y - 2, line.name, anchor="start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
