"""One self-contained HTML page about a run: curves, experts, timeline, memory, traffic, stragglers, events."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from ultrascale.observe.chart import line_chart, number
from ultrascale.observe.expert_pictures import pictures
from ultrascale.observe.run_record import RunRecord
from ultrascale.pipeline.actions import Kind
from ultrascale.pipeline.costs import at
from ultrascale.pipeline.draw_svg import svg
from ultrascale.pipeline.recording import Recording
from ultrascale.pipeline.simulate import Simulation, simulate
from ultrascale.pipeline.timeline import Timeline

MAX_EVENTS = 200
"""Events on the page, the newest of them; the file has all."""
MAX_DRAWN = 20_000
"""Actions of a step above which its pictures would make the page slow to open."""
STRAGGLER = 1.1
"""A rank that works so many times as long as the median of its peers is marked."""
_TIMELINE_WIDTH = 1080
_STYLE = """
body { font: 14px/1.5 'DejaVu Sans', Verdana, sans-serif; color: #111; background: #fff; margin: 24px auto;
  max-width: 1180px; padding: 0 16px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: left; border-bottom: 1px solid #eee; vertical-align: top; }
td.n, th.n { text-align: right; } td.t { white-space: nowrap; } th { color: #444; font-weight: normal; }
.charts { display: flex; flex-wrap: wrap; gap: 8px; } .wide { overflow-x: auto; } .note { color: #555; }
.mark { color: #b00020; font-weight: bold; } code { font: 12px 'DejaVu Sans Mono', monospace; word-break: break-word; }
"""


@dataclass(frozen=True)
class Comparison:
    """The pipeline of a run as it ran, and as the simulator says it would with the measured times of its actions.

    measured   the typical step
    makespans  step → seconds
    """

    measured: Timeline
    predicted: Simulation
    makespans: dict[int, float]

    @property
    def ratio(self) -> float:
        """Measured over predicted makespan, of the typical step; 1 when nothing but computing takes time."""
        return self.measured.makespan / self.predicted.makespan if self.predicted.makespan else float("nan")


def compare(recording: Recording) -> Comparison:
    """The recorded order of actions, simulated with the recorded costs, beside what was recorded."""
    times = {step: recording.timeline(step).makespan for step in recording.steps}
    return Comparison(recording.timeline(), simulate(recording.plan(), recording.costs()), times)


def page(run: RunRecord) -> str:
    """The HTML page, which loads nothing from elsewhere. Parts of which the run has nothing say so."""
    title = escape(f"{run.name}: {run.status.get('state', 'unknown')}")
    sections = (
        ("", _head(run)),
        ("Curves", _curves(run)),
        *([("Experts", experts)] if (experts := pictures(run)) else []),
        ("Pipeline", _pipeline(run)),
        ("Memory", _memory(run)),
        ("Traffic", _traffic(run)),
        ("Events", _events(run)),
    )
    body = "".join((f"<h2>{name}</h2>" if name else "") + content for name, content in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(run.name)}</h1>{body}</body></html>\n"
    )


def summary(run: RunRecord) -> dict[str, Any]:
    """The page's numbers for programs: run, state, step, last (metrics), timeline or null, ledger, peak_bytes."""
    timeline = None
    if run.recording is not None:
        found = compare(run.recording)
        timeline = {
            "schedule": run.recording.name,
            "steps": list(run.recording.steps),
            "measured_makespan_s": found.measured.makespan,
            "predicted_makespan_s": found.predicted.makespan,
            "measured_over_predicted": found.ratio,
            "bubble_fraction": found.predicted.bubble_fraction,
            "busy_s": {str(rank): busy for rank, busy in sorted(run.recording.busy().items())},
        }
    return {
        "run": str(run.path),
        "state": run.status.get("state"),
        "step": run.status.get("step"),
        "steps": len(run.metrics),
        "last": run.metrics[-1] if run.metrics else None,
        "timeline": timeline,
        "ledger": list(run.ledger),
        "peak_bytes": run.peak_bytes(),
        "events": len(run.events),
    }


def _head(run: RunRecord) -> str:
    manifest, schedule = run.manifest, run.manifest.get("schedule") or {}
    axes = " × ".join(f"{axis} {size}" for axis, size in (manifest.get("axes") or {}).items())
    hosts = {rank.get("host") for rank in manifest.get("ranks") or []}
    rows = [
        ("state", f"{run.status.get('state', 'unknown')}, {_step_reached(run)}"),
        ("reason", run.status.get("reason")),
        (
            "mesh",
            f"{axes} = {manifest.get('world_size')} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)}"
            if axes
            else None,
        ),
        ("schedule", _schedule_words(schedule)),
        ("parameters", f"{manifest['parameters']:,}" if isinstance(manifest.get("parameters"), int) else None),
        ("precision", ", ".join(f"{what} {dtype}" for what, dtype in (manifest.get("precision") or {}).items())),
        ("versions", ", ".join(f"{name} {said}" for name, said in (manifest.get("versions") or {}).items())),
        ("folder", str(run.path)),
        ("written", time.strftime("%Y-%m-%d %H:%M:%S")),
    ]
    return _table((), [(name, str(value)) for name, value in rows if value])


def _step_reached(run: RunRecord) -> str:
    step = max([int(x) for x, _ in run.series("step")] + [int(run.status.get("step") or 0)])
    return f"step {step}"


def _schedule_words(schedule: dict[str, Any]) -> str | None:
    if not schedule:
        return None
    layers = " | ".join(str(len(each)) for each in schedule.get("layers") or [])
    words = f"{schedule.get('name')}, {schedule.get('stages')} stages, {schedule.get('micro_batches')} micro-batches"
    return f"{words}, layers {layers}" if layers else words


def _curves(run: RunRecord) -> str:
    charts = [
        line_chart("loss", {"validation": run.series("validation_loss"), "training": run.series("loss")}),
        line_chart("gradient norm, before clipping", {"grad_norm": run.series("grad_norm")}),
        line_chart("learning rate", {"lr": run.series("lr")}),
        line_chart("throughput, tokens/s of the whole job", {"tokens_per_s": run.series("tokens_per_s")}),
        line_chart("time of a step, s", {"step_time_s": run.series("step_time_s")}),
        line_chart("MFU", {"mfu": run.series("mfu")}),
    ]
    others = sorted({key for record in run.metrics for key in record if key.startswith("aux_")})
    charts += [line_chart(key, {key: run.series(key)}) for key in others]
    drawn = "".join(filter(None, charts))
    return f'<div class="charts">{drawn}</div>' if drawn else _nothing("No step has been logged yet.")


def _pipeline(run: RunRecord) -> str:
    if run.recording is None:
        return _nothing("No timeline was recorded; train with <code>profile.timeline=true</code> to see it here.")
    found = compare(run.recording)
    predicted = found.predicted.timeline("s")
    longest = max(predicted.makespan, found.measured.makespan)
    words = (
        f"Measured {found.measured.makespan:.4g} s, predicted {predicted.makespan:.4g} s: "
        f"<b>{found.ratio:.3f}</b> of the prediction. Predicted is the same order of actions, simulated with the "
        "median time of each action on each stage and free messages; what it lacks is communication, reductions and "
        f"noise. Bubble of the prediction: {found.predicted.bubble_fraction:.1%} of the makespan, "
        f"{found.predicted.bubble_over_ideal:.1%} of ideal."
    )
    spread = sorted(found.makespans.values())
    steps = f"Makespans of {len(spread)} steps: {spread[0]:.4g} to {spread[-1]:.4g} s, median {median(spread):.4g} s."
    predicted = Timeline(f"{predicted.title}: predicted", predicted.placement, predicted.rows, "s", predicted.notes)
    if sum(map(len, predicted.rows)) > MAX_DRAWN:
        pictures = _nothing("Too many actions to draw here; <code>--timeline F.html</code> writes them to zoom into.")
    else:
        drawn = (svg(timeline, _TIMELINE_WIDTH, longest) for timeline in (found.measured, predicted))
        pictures = "".join(f'<div class="wide">{picture}</div>' for picture in drawn)
    return f"<p>{words}<br/>{steps}</p>{pictures}{_stage_costs(found)}{_stragglers(run, run.recording)}"


def _stage_costs(found: Comparison) -> str:
    plan, costs = found.predicted.plan, found.predicted.costs
    kinds = [(name, value) for name in ("F", "BI", "BW", "FB") if (value := getattr(costs, name)) is not None]
    if not any(event.action.kind is Kind.BI for event in found.measured.events()):
        whole = tuple(at(costs.BI, stage) + at(costs.BW, stage) for stage in range(plan.stages))
        kinds = [("F", costs.F), ("B", whole), *(kind for kind in kinds if kind[0] == "FB")]
    rows = [
        (
            str(stage),
            ", ".join(map(str, plan.placement[stage])),
            *(f"{1e3 * at(value, stage):.3f}" for _, value in kinds),
        )
        for stage in range(plan.stages)
    ]
    heads = ("stage", "pp rank", *(f"{name}, ms" for name, _ in kinds))
    return "<p>Median time of an action:</p>" + _table(heads, rows, numbers=range(2, 2 + len(kinds)))


def _stragglers(run: RunRecord, recording: Recording) -> str:
    busy = recording.busy()
    peers: dict[int, list[float]] = defaultdict(list)
    place = {rank: at for ranks in recording.ranks for at, rank in enumerate(ranks)}
    for rank, seconds in busy.items():
        peers[place[rank]].append(seconds)
    hosts = {rank["rank"]: rank.get("host", "") for rank in run.manifest.get("ranks") or []}
    rows = []
    for rank, seconds in sorted(busy.items()):
        ratio = seconds / median(peers[place[rank]]) if seconds else 1.0
        shown = f"{ratio:.2f}"
        rows.append((str(rank), str(place[rank]), str(hosts.get(rank, "")), f"{1e3 * seconds:.3f}", shown))
    marked = [number for number, row in enumerate(rows) if float(row[4]) > STRAGGLER]
    words = "Ranks of one pp coordinate do the same work; one that takes longer than its peers holds up all others."
    heads = ("rank", "pp rank", "host", "computes, ms a step", "over the median of its peers")
    return f"<p>{words}</p>" + _table(heads, rows, numbers=(3, 4), marked=marked)


def _memory(run: RunRecord) -> str:
    chart = line_chart("peak memory, the largest over ranks, GiB", {
        "peak": [(step, value / 2**30) for step, value in run.series("peak_memory_bytes")]
    })  # fmt: skip
    rows = [
        (str(rank), *(_bytes(peak.get(key)) for key in ("peak", "allocated", "reserved")))
        for rank, peak in enumerate(run.peak_bytes())
    ]
    if not rows and not chart:
        return _nothing("Nothing has been measured yet.")
    heads = ("rank", "peak", "allocated by tensors", "reserved by the allocator")
    return f'<div class="charts">{chart}</div>' + (_table(heads, rows, numbers=(1, 2, 3)) if rows else "")


def _traffic(run: RunRecord) -> str:
    if not run.ledger:
        return _nothing("No ledger has been written yet; it comes with the first step.")
    rows = sorted(run.ledger, key=lambda row: -row.get("bytes", 0))
    total = sum(row.get("bytes", 0) for row in rows) or 1
    shown = [
        (
            " × ".join(row.get("axes") or []) or "(no axis)",
            str(row.get("op")),
            str(row.get("phase")),
            f"{row.get('calls', 0):,}",
            _bytes(row.get("bytes", 0)),
            f"{row.get('bytes', 0) / total:.1%}",
        )
        for row in rows
    ]
    words = "What rank 0 sent in one step, by the axes of the group. A receive costs its sender."
    heads = ("axes", "operation", "phase", "calls", "bytes", "share")
    return f"<p>{words}</p>" + _table(heads, shown, numbers=(3, 4, 5))


def _events(run: RunRecord) -> str:
    if not run.events:
        return _nothing("None.")
    rows = []
    for event in run.events[-MAX_EVENTS:]:
        more = {key: value for key, value in event.items() if key not in ("time", "event", "step")}
        when = event.get("time")
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if isinstance(when, int | float) else ""
        said = ", ".join(
            f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in more.items()
        )
        step = "" if event.get("step") is None else str(event["step"])
        rows.append((moment, step, str(event.get("event")), said if len(said) <= 400 else said[:397] + "…"))
    hidden = len(run.events) - len(rows)
    before = f'<p class="note">{hidden} older ones are in events.jsonl.</p>' if hidden else ""
    return before + _table(("time", "step", "event", ""), rows, numbers=(1,), code=(3,))


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    marked: Iterable[int] = (),
    code: Iterable[int] = (),
) -> str:
    """Rows of plain text; columns in `numbers` stand at the right, rows in `marked` are red."""
    right, red, mono = set(numbers), set(marked), set(code)

    def cell(tag: str, column: int, content: str) -> str:
        inner = f"<code>{escape(content)}</code>" if tag == "td" and column in mono and content else escape(content)
        style = ' class="n"' if column in right else ""
        return f"<{tag}{style}>{inner}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", column, head) for column, head in enumerate(heads)) + "</tr>"] if heads else []
    for number_, row in enumerate(rows):
        style = ' class="mark"' if number_ in red else ""
        lines.append(f"<tr{style}>" + "".join(cell("td", column, text) for column, text in enumerate(row)) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _nothing(words: str) -> str:
    return f'<p class="note">{words}</p>'


def _bytes(value: object) -> str:
    if not isinstance(value, int | float):
        return "n/a"
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{number(value)} B"
