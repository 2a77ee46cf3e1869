"""A timeline as one HTML page that needs nothing else: hover, zoom, scroll, dependencies of an action.

The boxes are drawn on a canvas: a step of 64 ranks with hundreds of micro-batches has a hundred thousand of them.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from ultrascale.pipeline.colours import WORDS, ink, shade
from ultrascale.pipeline.draw_svg import legend_items, legend_words
from ultrascale.pipeline.timeline import Event, Timeline, dependencies

_STYLE = """
body { margin: 0; font: 13px 'DejaVu Sans', Verdana, sans-serif; color: #111; background: #fff; }
header { padding: 12px 16px 4px; }
h1 { font-size: 17px; margin: 0 0 4px; }
.notes { color: #444; margin: 0 0 6px; }
.legend span { display: inline-block; margin: 2px 18px 2px 0; }
.legend i { display: inline-block; width: 13px; height: 13px; margin-right: 2px; vertical-align: -2px; }
.bar { padding: 4px 16px 8px; }
.bar button, .bar label { font: inherit; margin-right: 8px; }
.bar .hint { color: #555; }
#tip { position: fixed; display: none; pointer-events: none; background: #222; color: #fff; padding: 6px 9px;
  border-radius: 4px; font-size: 12px; line-height: 1.45; white-space: pre; z-index: 2; }
canvas { display: block; }
"""


def html(timeline: Timeline, critical_path: tuple[Event, ...] = ()) -> str:
    """The page. `critical_path` can be shown by a switch when it is given.

    Under the pointer: action, rank, stage, micro-batch, start, end, length; what it needs and what needs it are
    framed, and all else is dimmed. Ctrl and the wheel zoom, dragging moves, a double click shows everything again.
    """
    data = json.dumps(as_data(timeline, critical_path), separators=(",", ":"))  # numbers and kinds: no text to escape
    notes = " · ".join(f"{what} {value}" for what, value in timeline.notes)
    items = [*legend_items(timeline), *((words, []) for words in legend_words(timeline))]
    legend = "".join(f"<span>{_swatches(colours)} {escape(words)}</span>" for words, colours in items)
    switch = '<label><input type="checkbox" id="critical"/> critical path</label>' if critical_path else ""
    script = files("ultrascale.pipeline").joinpath("timeline.js").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{escape(timeline.title)}</title><style>{_STYLE}</style></head>
<body><header><h1>{escape(timeline.title)}</h1><p class="notes">{escape(notes)}</p>
<div class="legend">{legend}</div></header>
<div class="bar"><button id="in">zoom in</button><button id="out">zoom out</button><button id="all">show all</button>
{switch}
<span class="hint">Ctrl + wheel: zoom · drag: move · hover: what an action needs (blue) and what needs it (red)</span>
</div>
<canvas id="timeline"></canvas><div id="tip"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script></body></html>
"""


def _swatches(colours: list[str]) -> str:
    return "".join(f'<i style="background:{colour}"></i>' for colour in colours)


def as_data(timeline: Timeline, critical_path: tuple[Event, ...] = ()) -> dict[str, Any]:
    """What the page's script reads.

    events  [rank, start, end, [part, …]], times from the start of the timeline; a part is
            [kind, stage, micro-batch, variant], two of them in an FB
    needs   [producer, consumer], positions in `events`
    """
    events = list(timeline.events())
    place = {id(event): index for index, event in enumerate(events)}
    start = timeline.start
    count = timeline.variants
    fills = {str(kind): [shade(kind, variant, count) for variant in range(count)] for kind in WORDS}
    return {
        "ranks": timeline.ranks,
        "unit": timeline.unit,
        "length": float(timeline.makespan),
        "fills": fills,
        "inks": {kind: [ink(fill) for fill in shades] for kind, shades in fills.items()},
        "events": [
            [
                event.rank,
                float(event.start - start),
                float(event.end - start),
                [[part.kind, part.stage, part.micro_batch, timeline.variant(event.rank, part)]
                 for part in event.action.computes],
            ]
            for event in events
        ],
        "needs": [[place[id(source)], place[id(event)]] for source, event in dependencies(timeline.rows)],
        "critical": [place[id(event)] for event in critical_path],
    }  # fmt: skip
