"""A roofline: what the machine's two limits allow at each intensity, and where measured rows are.

Both axes are logarithmic: FLOPs per byte that the work needs, and FLOP/s reached. Below the roof's
slope a row is bound by memory, below its flat part by products; the distance to the roof is what
could be gained. Pure: rows of bench/engine.py in, SVG text out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, KEY = 520, 360, 84, 44, 56, 250
ROOF, OURS, THEIRS, GRID, TEXT = "#57606a", "#1f6feb", "#d1242f", "#e4e7eb", "#24292f"
UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True, slots=True)
class Point:
    """One measured row: FLOPs per byte, and the FLOP/s of Baton and of its opponent."""

    name: str
    intensity: float
    flops_per_s: float
    compared_flops_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Roofline:
    """One picture. Limits are in bytes/s and FLOP/s."""

    title: str
    read_bytes_per_s: float
    flops_per_s: float
    points: Sequence[Point]
    compared: str = "transformers"

    @property
    def ridge(self) -> float:
        """The intensity above which products are the limit."""
        return self.flops_per_s / self.read_bytes_per_s


@dataclass(frozen=True, slots=True)
class _Axis:
    """Decades [low, high) mapped to pixels."""

    low: int
    high: int
    start: float
    length: float

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + self.length * min(1.0, max(0.0, share))

    @property
    def ticks(self) -> Iterator[float]:
        return (10.0**exponent for exponent in range(self.low, self.high + 1))


def svg(picture: Roofline) -> str:
    """Return the picture as one SVG document, with numbered points and their names beside it."""
    reached = [p.flops_per_s for p in picture.points]
    reached += [p.compared_flops_per_s for p in picture.points if p.compared_flops_per_s]
    xs = [*(p.intensity for p in picture.points), picture.ridge]
    ys = [*reached, picture.flops_per_s]
    # A point on the picture's edge would have no room for its number.
    x = _Axis(math.floor(math.log10(min(xs) / 1.25)), _above(max(xs) * 1.25), LEFT, WIDTH)
    y = _Axis(math.floor(math.log10(min(ys))), _above(max(ys)), TOP + HEIGHT, -HEIGHT)
    size = f'width="{LEFT + WIDTH + KEY}" height="{TOP + HEIGHT + BOTTOM}"'
    turned = f'transform="translate(20,{TOP + HEIGHT / 2}) rotate(-90)"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
        _text(LEFT + WIDTH / 2, TOP - 18, picture.title, bold=True),
        _text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, "FLOPs per byte read"),
        f'<text {turned} text-anchor="middle" fill="{TEXT}">FLOP/s</text>',
        *_grid(x, y),
        *_roof(picture, x, y),
        *_points(picture, x, y),
    ]
    return "\n".join([*body, "</svg>", ""])


def _above(value: float) -> int:
    return math.floor(math.log10(value)) + 1


def _grid(x: _Axis, y: _Axis) -> Iterator[str]:
    for tick in x.ticks:
        at = x.at(tick)
        yield f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{TOP + HEIGHT}" stroke="{GRID}"/>'
        yield _text(at, TOP + HEIGHT + 18, f"{tick:g}")
    for tick in y.ticks:
        at = y.at(tick)
        yield f'<line x1="{LEFT}" y1="{at:.1f}" x2="{LEFT + WIDTH}" y2="{at:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 8, at + 4, _short(tick), anchor="end")


def _roof(picture: Roofline, x: _Axis, y: _Axis) -> Iterator[str]:
    """Draw the roof, and say its two limits."""
    path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in _corners(picture, x, y))
    yield f'<polyline points="{path}" fill="none" stroke="{ROOF}" stroke-width="2"/>'
    limits = (
        f"reads {picture.read_bytes_per_s / 1e9:.1f} GB/s",
        f"products {picture.flops_per_s / 1e12:.2f} TFLOP/s",
    )
    for index, told in enumerate(limits):
        yield _text(LEFT + WIDTH + 20, TOP + 12 + 16 * index, told, anchor="start")


def _corners(picture: Roofline, x: _Axis, y: _Axis) -> list[tuple[float, float]]:
    """Return the ends of the slope, from where it enters the picture, and of the flat part."""
    enters = max(10.0**x.low, 10.0**y.low / picture.read_bytes_per_s)
    return [
        (enters, enters * picture.read_bytes_per_s),
        (picture.ridge, picture.flops_per_s),
        (10.0**x.high, picture.flops_per_s),
    ]


def _along(picture: Roofline, x: _Axis, y: _Axis) -> Iterator[tuple[float, float]]:
    """Yield places of the roof, so near to each other that no number fits between them."""
    corners = [(x.at(a), y.at(b)) for a, b in _corners(picture, x, y)]
    for (a, b), (c, d) in pairwise(corners):
        steps = max(1, math.ceil(math.dist((a, b), (c, d)) / 10))
        yield from ((a + (c - a) * i / steps, b + (d - b) * i / steps) for i in range(steps + 1))


def _points(picture: Roofline, x: _Axis, y: _Axis) -> Iterator[str]:
    """Draw Baton's points filled, those of its opponent hollow, and a line between the two."""
    left, top = LEFT + WIDTH + 20, TOP + 56
    yield f'<circle cx="{left + 4}" cy="{top - 4}" r="4" fill="{OURS}"/>'
    yield _text(left + 16, top, "Baton", anchor="start")
    theirs = [(p.intensity, p.compared_flops_per_s) for p in picture.points]
    others = [(x.at(at), y.at(high)) for at, high in theirs if high]
    if others:
        yield f'<circle cx="{left + 74}" cy="{top - 4}" r="4" fill="white" stroke="{THEIRS}"/>'
        yield _text(left + 86, top, picture.compared, anchor="start")
    yield _text(left, top + 24, "reached, of the roof:", anchor="start")
    ours = [(x.at(point.intensity), y.at(point.flops_per_s)) for point in picture.points]
    taken = [*ours, *others, *_along(picture, x, y)]
    for number, point in enumerate(picture.points, 1):
        at, high = x.at(point.intensity), y.at(point.flops_per_s)
        if point.compared_flops_per_s:
            low = y.at(point.compared_flops_per_s)
            line = f'x1="{at:.1f}" y1="{high:.1f}" x2="{at:.1f}" y2="{low:.1f}"'
            yield f'<line {line} stroke="#bbb"/>'
            yield f'<circle cx="{at:.1f}" cy="{low:.1f}" r="4" fill="white" stroke="{THEIRS}"/>'
        yield f'<circle cx="{at:.1f}" cy="{high:.1f}" r="4" fill="{OURS}"/>'
        spot = _free(at, high, taken)
        taken.append(spot)
        yield _text(spot[0], spot[1] + 4, str(number))
        roof = min(picture.flops_per_s, point.intensity * picture.read_bytes_per_s)
        told = f"{number}  {point.name}: {point.flops_per_s / roof:.0%}"
        yield _text(left, top + 24 + 18 * number, told, anchor="start")


def _free(at: float, high: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return where a point's number may stand: the first place around it, within the picture, that
    nothing else takes.
    """
    around = [(13, 0), (-13, 0), (0, -14), (0, 14), (13, -13), (-13, -13), (13, 13), (-13, 13)]
    places = [(at + far * dx, high + far * dy) for far in (1, 2, 3, 4) for dx, dy in around]
    places = [place for place in places if LEFT + 8 < place[0] < LEFT + WIDTH - 8]
    for place in places:
        if all(abs(place[0] - a) > 12 or abs(place[1] - b) > 11 for a, b in taken):
            return place
    return places[0]


def _short(value: float) -> str:
    size, unit = next(each for each in UNITS if value >= each[0] or each[0] == 1.0)
    return f"{value / size:g} {unit}"


def _text(x: float, y: float, text: str, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{TEXT}"{weight}>'
        f"{escape(text)}</text>"
    )
