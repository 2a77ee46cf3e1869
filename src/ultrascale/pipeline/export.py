"""Plans and timelines as files for other programs: CSV of the actions, Chrome trace of the events."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.timeline import Timeline, dependencies

MICROSECONDS = {"s": 1e6, "": 1e3}
"""Of one unit of time in a trace, which has no other unit: a cost of 1 is shown as a millisecond."""


def csv_text(plan: Plan) -> str:
    """One line per rank: its compute actions in order, in the text form of actions.py.

    `ultrascale schedule custom:FILE` reads it. FB has a comma in it and is quoted.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for actions in plan.compute_only().actions:
        writer.writerow(map(str, actions))
    return file.getvalue()


def chrome_trace(timeline: Timeline) -> str:
    """JSON for chrome://tracing and ui.perfetto.dev: a thread per rank, a flow arrow per message between ranks."""
    scale, origin = MICROSECONDS[timeline.unit], timeline.start
    records: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": timeline.title}}
    ]
    for rank in range(timeline.ranks):
        records.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        records.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
    for event in timeline.events():
        start, end = (float(moment - origin) * scale for moment in (event.start, event.end))
        record: dict[str, Any] = {"name": str(event.action), "cat": str(event.action.kind), "ph": "X", "pid": 0}
        record |= {"tid": event.rank, "ts": start, "dur": end - start}
        parts = [{"stage": part.stage, "micro_batch": part.micro_batch} for part in event.action.computes]
        record["args"] = parts[0] if len(parts) == 1 else {"forward": parts[0], "backward": parts[1]}
        records.append(record)
    apart = (pair for pair in dependencies(timeline.rows) if pair[0].rank != pair[1].rank)
    for number, (source, target) in enumerate(apart):
        flow = {"name": "message", "cat": "message", "pid": 0, "id": number}
        # A flow is bound to the slice that its moment lies in: just before the end of one, at the start of the other.
        leaves = float(source.end - origin - (source.end - source.start) / 1000) * scale
        records.append({**flow, "ph": "s", "tid": source.rank, "ts": leaves})
        records.append({**flow, "ph": "f", "bp": "e", "tid": target.rank, "ts": float(target.start - origin) * scale})
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})
