"""Line charts as inline SVG: CSS classes for colours, a title for each point, no script; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 44
TICKS = 5
MARKED = 40  # lines with more points have no dots


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    said: str = ""  # tooltip


@dataclass(frozen=True, slots=True)
class Series:
    """A line; `kind` is its class: c0 to c5, or `front`."""

    name: str
    points: Sequence[Point]
    kind: str = "c0"
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a chart."""

    title: str
    x: str
    y: str
    limit: float | None = None  # an objective: a dashed line across
    most_y: float | None = None


def chart(axes: Axes, series: Sequence[Series]) -> str:
    """A figure with a chart and its legend."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    xs, ys = _ticks(max(point.x for point in points)), _ticks(_most(axes, points))
    scale = _Scale(xs[-1], ys[-1])
    parts = [_grid(axes, xs, ys, scale)]
    if axes.limit is not None and axes.limit <= ys[-1]:
        at = scale.y(axes.limit)
        parts.append(f'<path class="limit" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
    parts += [_line(one, scale) for one in series]
    names = "".join(f'<span class="{one.kind}">{escape(one.name)}</span>' for one in series)
    if axes.limit is not None:
        where = "" if axes.limit <= ys[-1] else ", above this chart"
        names += f'<span class="limit">objective {axes.limit:g}{where}</span>'
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.title)}">{"".join(parts)}</svg>'
    return f"<figure><h3>{escape(axes.title)}</h3>{picture}<figcaption>{names}</figcaption></figure>"


def _most(axes: Axes, points: Sequence[Point]) -> float:
    most = max(point.y for point in points)
    if axes.limit is not None and axes.limit <= 3 * most:
        most = max(most, axes.limit)
    return axes.most_y or most


@dataclass(frozen=True, slots=True)
class _Scale:
    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.most_x

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, value / self.most_y)


def _ticks(most: float) -> list[float]:
    """Round tick values from 0 to `most` or just above."""
    most = most or 1.0
    rough = most / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def _grid(axes: Axes, xs: Sequence[float], ys: Sequence[float], scale: _Scale) -> str:
    base = HEIGHT - BOTTOM
    rows = [f'<path class="grid" d="M{LEFT} {scale.y(y):.1f}H{WIDTH - RIGHT}"/>' for y in ys]
    rows += [f'<text class="end" x="{LEFT - 6}" y="{scale.y(y) + 4:.1f}">{_short(y)}</text>' for y in ys]
    rows += [f'<text class="mid" x="{scale.x(x):.1f}" y="{base + 16}">{_short(x)}</text>' for x in xs]
    rows.append(f'<text class="mid name" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}">{escape(axes.x)}</text>')
    turned = f'transform="rotate(-90 14 {(TOP + base) / 2:.0f})"'
    rows.append(f'<text class="mid name" x="14" y="{(TOP + base) / 2:.0f}" {turned}>{escape(axes.y)}</text>')
    return "".join(rows)


def _line(one: Series, scale: _Scale) -> str:
    at = [(scale.x(point.x), scale.y(point.y)) for point in one.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    joined = f'<path class="line {one.kind}" d="{path}"/>' if one.joined and len(at) > 1 else ""
    if len(at) > MARKED:
        return joined
    dots = "".join(
        f'<circle class="{one.kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(point.said)}</title></circle>'
        for (x, y), point in zip(at, one.points, strict=True)
    )
    return joined + dots


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
