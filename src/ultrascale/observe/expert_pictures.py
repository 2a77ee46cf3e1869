"""How evenly experts were used, as a part of the page about a run: maps of the newest counts and of earlier ones, and
curves by layer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ultrascale.observe.chart import Points, line_chart
from ultrascale.observe.heat_map import Axes, heat_map, legend, loads_of
from ultrascale.observe.run_record import Load, RunRecord

EARLIER = 6
"""Small maps before the newest one."""
CURVES = 8
"""Layers up to which each has a curve of its own; of more, the worst, the median and the best are drawn."""
_WIDE, _SMALL = (1100, 520), (360, 240)
_COLUMNS = 500
"""Of the map of layers over time."""

Series = Sequence[tuple[float, Sequence[float | None]]]


def pictures(run: RunRecord) -> str:
    """HTML; empty for a model without experts."""
    figures = run.lists("expert_load")
    parts = [_maps(run.loads), _curves(run, figures), _over_time(run.loads, figures)]
    if not any(parts):
        return ""
    words = (
        "The load of an expert is its tokens over the mean of its layer: 1 where all get alike. A step takes as long "
        "as the ranks with the busiest experts."
    )
    return f"<p>{words}</p>{legend()}" + "".join(parts)


def _maps(loads: Sequence[Load]) -> str:
    """The newest counts, and before it a few earlier ones, evenly apart."""
    if not loads:
        return ""
    newest, earlier = loads[-1], loads[:-1]
    many = min(EARLIER, len(earlier))
    chosen = [earlier[place * len(earlier) // many] for place in range(many)]
    return (
        _said(newest)
        + f'<div class="wide">{_map(newest, *_WIDE)}</div>'
        + _row([_map(each, *_SMALL) for each in chosen])
    )


def _map(load: Load, width: int, height: int) -> str:
    axes = Axes("layer", load.layers, "expert", range(len(load.tokens[0])))
    return heat_map(f"load at step {load.step}", loads_of(load.tokens), axes, width, height)


def _said(load: Load) -> str:
    """The busiest expert, and how many got nothing."""
    found = [
        (value, layer, expert)
        for layer, row in zip(load.layers, loads_of(load.tokens), strict=True)
        for expert, value in enumerate(row)
        if value is not None
    ]
    if not found:
        return ""
    worst, layer, expert = max(found)
    idle = sum(value == 0 for value, _, _ in found)
    return (
        f"<p>At step {load.step} expert {expert} of layer {layer} is the busiest, with <b>{worst:.2f}</b> times the "
        f"mean; {idle} of {len(found)} got no token.</p>"
    )


def _curves(run: RunRecord, figures: Series) -> str:
    layers = run.loads[-1].layers if run.loads else ()
    entropies = run.lists("expert_entropy")
    ranges = [(step, low, high) for step, (low, high) in _pairs(run.lists("router_bias_range"))]
    biases = {"largest": [(s, high) for s, _, high in ranges], "smallest": [(s, low) for s, low, _ in ranges]}
    return _row(
        [
            line_chart("busiest expert over the mean, by layer", _by_layer(figures, layers, high_is_worst=True)),
            line_chart("entropy of the load, by layer", _by_layer(entropies, layers, high_is_worst=False)),
            line_chart("biases of routers", biases),
        ]
    )


def _by_layer(figures: Series, layers: Sequence[int], high_is_worst: bool) -> dict[str, Points]:
    count = max((len(values) for _, values in figures), default=0)
    if count <= CURVES:
        names = layers if len(layers) == count else range(count)
        return {
            str(name): [(step, v) for step, values in figures if at < len(values) and (v := values[at]) is not None]
            for at, name in enumerate(names)
        }
    known = [(step, [v for v in values if v is not None]) for step, values in figures]
    best, worst = (min, max) if high_is_worst else (max, min)
    return {
        "best": [(step, best(values)) for step, values in known if values],
        "median": [(step, median(values)) for step, values in known if values],
        "worst": [(step, worst(values)) for step, values in known if values],
    }


def _over_time(loads: Sequence[Load], figures: Series) -> str:
    """Layers × steps, where they are too many for curves: the worst of the steps that share a column."""
    count = max((len(values) for _, values in figures), default=0)
    whole = [(int(step), values) for step, values in figures if len(values) == count]
    if count <= CURVES or len(whole) < 2:
        return ""
    columns = min(_COLUMNS, len(whole))
    groups = [whole[at * len(whole) // columns : (at + 1) * len(whole) // columns] for at in range(columns)]
    values = [
        [max((v for _, each in group if (v := each[layer]) is not None), default=None) for group in groups]
        for layer in range(count)
    ]
    layers = loads[-1].layers if loads and len(loads[-1].layers) == count else range(count)
    axes = Axes("layer", layers, "step", [group[-1][0] for group in groups])
    return f'<div class="wide">{heat_map("busiest expert over the mean", values, axes, *_WIDE)}</div>'


def _pairs(found: Series) -> list[tuple[float, tuple[float, float]]]:
    return [(step, (v[0], v[1])) for step, v in found if len(v) == 2 and v[0] is not None and v[1] is not None]


def _row(drawn: Sequence[str]) -> str:
    shown = "".join(filter(None, drawn))
    return f'<div class="charts">{shown}</div>' if shown else ""
