"""Line charts as SVG, for pages that load nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Point = tuple[float, float]
Points = Sequence[Point]

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 30, 32
_INKS = ("#1f6fb2", "#c05a00", "#00785a", "#a03c78", "#5b4fb8", "#7a6a00", "#c02e2e", "#4a4a4a")
_COLUMNS = 500
"""Of a chart; of more points than that, each column shows its lowest and its highest."""


def line_chart(title: str, series: Mapping[str, Points]) -> str:
    """One SVG element: the series over their common x, which is the step. Series without points are left out."""
    drawn = {name: points for name, points in series.items() if points}
    everything = [point for points in drawn.values() for point in points]
    if not everything:
        return ""
    x_low, x_high = min(x for x, _ in everything), max(x for x, _ in everything)
    y_ticks = nice_ticks(min(y for _, y in everything), max(y for _, y in everything), 5)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at(point: Point) -> Point:
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * ((point[0] - x_low) / (x_high - x_low) if x_high > x_low else 0.5)
        y = HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * ((point[1] - y_low) / (y_high - y_low))
        return x, y

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}' "
        f"font-family='DejaVu Sans, Verdana, sans-serif' role='img'><title>{escape(title)}</title>",
        f"<text x='{_LEFT}' y='18' font-size='13' font-weight='bold' fill='#111'>{escape(title)}</text>",
    ]
    for tick in y_ticks:
        _, y = at((x_low, tick))
        parts.append(f"<path d='M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}' stroke='#e2e2e2'/>")
        parts.append(_label(number(tick), _LEFT - 6, y + 4, "end"))
    for tick in nice_ticks(x_low, x_high, 6):
        if x_low <= tick <= x_high and tick == int(tick):
            x, _ = at((tick, y_low))
            parts.append(_label(f"{tick:g}", x, HEIGHT - _BOTTOM + 16, "middle"))
    right = float(WIDTH - _RIGHT)
    for position, (name, points) in enumerate(drawn.items()):
        ink = _INKS[position % len(_INKS)]
        parts.append(_line(name, thinned(points), at, ink))
        if len(drawn) > 1:
            parts.append(
                f"<text x='{right:g}' y='18' font-size='11' fill='{ink}' text-anchor='end'>{escape(name)}</text>"
            )
            right -= 7 * len(name) + 14
    return "".join([*parts, "</svg>"])


def _line(name: str, points: Points, at: Callable[[Point], Point], ink: str) -> str:
    places = [at(point) for point in points]
    drawn = "".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(places))
    line = f"<path d='{drawn}' fill='none' stroke='{ink}' stroke-width='1.6' stroke-linejoin='round'/>"
    radius, opacity = (2.4, 1) if len(places) <= 60 else (4, 0)  # many points: only to point at
    dots = "".join(
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' fill='{ink}' fill-opacity='{opacity}'>"
        f"<title>{escape(name)} {value:.6g}, step {step:g}</title></circle>"
        for (x, y), (step, value) in zip(places, points, strict=True)
    )
    return line + dots


def _label(text: str, x: float, y: float, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='11' fill='#444' text-anchor='{anchor}'>{escape(text)}</text>"


def thinned(points: Points, columns: int = _COLUMNS) -> list[Point]:
    """At most 2 · columns of the points, in order: of each run of neighbours its lowest and its highest, so that no
    spike is lost."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = []
    for column in range(columns):
        run = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        kept += sorted({min(run, key=lambda point: point[1]), max(run, key=lambda point: point[1])})
    return kept


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers, evenly apart, the first at or below `low` and the last at or above `high`."""
    if high <= low:
        middle = abs(low) or 1.0
        low, high = low - middle / 2, high + middle / 2
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """Short: 12.3k, 1.5M, 0.003, 3e-05."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.3g}"
