"""`ultrascale schedule`: validates a schedule, simulates it and draws it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from ultrascale.pipeline.actions import Plan, ScheduleError
from ultrascale.pipeline.costs import Costs, parse_costs
from ultrascale.pipeline.draw import legend, text
from ultrascale.pipeline.draw_html import html
from ultrascale.pipeline.draw_svg import svg
from ultrascale.pipeline.export import chrome_trace, csv_text
from ultrascale.pipeline.program import program
from ultrascale.pipeline.recording import measured_costs
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import Simulation, simulate

_DEFAULT_COSTS = "F=1,BI=1,BW=1,P2P=0"
_FILES: dict[str, tuple[str, Callable[[Simulation, str], str]]] = {
    "svg": ("picture of the timeline", lambda result, unit: svg(result.timeline(unit))),
    "html": (
        "the same to zoom into and to point at, with the dependencies of each action",
        lambda result, unit: html(result.timeline(unit), result.critical_path),
    ),
    "csv": (
        "each rank's actions in a line; `custom:F` is this schedule again",
        lambda result, _: csv_text(result.plan),
    ),
    "trace": ("for chrome://tracing and ui.perfetto.dev", lambda result, unit: chrome_trace(result.timeline(unit))),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments, description and example of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Validate a pipeline schedule, simulate it, and draw it. Schedules:\n" + "\n".join(
        f"  {entry.name:<28} {entry.summary}{_aliases(entry)}" for entry in registry.SCHEDULES
    )
    parser.epilog = "example:\n  ultrascale schedule 1f1b --stages 4 --microbatches 8 --cost F=1,BI=1,BW=1,P2P=0.1"
    parser.add_argument("name", metavar="NAME", help="schedule, see above")
    parser.add_argument("--stages", metavar="P", type=int, required=True, help="ranks of the pipeline")
    parser.add_argument("--microbatches", metavar="M", type=int, required=True, help="micro-batches per step")
    parser.add_argument("--virtual", metavar="V", type=int, help="stages per rank (default: the schedule's own)")
    parser.add_argument("--group", metavar="N", type=int, help="micro-batches that run in turn on a virtual stage")
    parser.add_argument("--limit", metavar="N", type=int, help="activations (stage × micro-batch) a rank may hold")
    parser.add_argument(
        "--cost",
        default="",
        metavar="F=1,BI=1,…",
        help="per stage and micro-batch, the time of a forward (F), of the gradients of input (BI) and weights (BW), "
        "of a forward and a backward that run together (FB), of recomputation (R); the latency of a message (P2P), "
        "its bytes (MESSAGE) over the BANDWIDTH; the bytes of an ACTIVATION, and of what is HELD of it for BW. "
        f"F=1:1:2 is a number for each of three stages (default: {_DEFAULT_COSTS})",
    )
    parser.add_argument(
        "--cost-from",
        metavar="RUN",
        help="run folder of a training with profile.timeline=true: its times, in seconds, of this many stages",
    )
    for name, (what, _) in _FILES.items():
        parser.add_argument(f"--{name}", metavar="F", type=Path, help=f"write F: {what}")
    parser.add_argument("--width", type=int, default=100, help="columns of the timeline (default: 100)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table and the timeline")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 2 when the schedule does not exist or does not take these numbers, or a file cannot be
    written."""
    unit = "s" if args.cost_from else ""
    try:
        costs = parse_costs(args.cost, measured_costs(args.cost_from) if args.cost_from else None)
        plan = program(args.name, args.stages, args.microbatches, args.virtual, costs, args.group, args.limit)
        result = simulate(plan, costs)
        said = _explanation(args, costs, plan)
        written = _write_files(args, result, unit)
    except ScheduleError as error:
        print(f"ultrascale schedule: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(result)) if args.json else as_text(result, max(args.width, 10), unit))
    if said and not args.json:
        print(f"\n{said}")
    if written and not args.json:
        print("\nwrote " + ", ".join(written))
    return 0


def _explanation(args: argparse.Namespace, costs: Costs, plan: Plan) -> str | None:
    """What a search has gained, where there was one."""
    entry = registry.find(args.name)
    if entry.explain is None:
        return None
    request = registry.request(entry, args.stages, args.microbatches, args.virtual, costs, args.group, args.limit)
    return entry.explain(request, plan)


def _write_files(args: argparse.Namespace, result: Simulation, unit: str) -> list[str]:
    written = []
    for name, (_, content) in _FILES.items():
        path: Path | None = getattr(args, name)
        if path is not None:
            try:
                path.write_text(content(result, unit), encoding="utf-8")
            except OSError as error:
                reason = error.strerror or error
                raise ScheduleError(f"--{name} {path} cannot be written: {reason}; give another file") from error
            written.append(str(path))
    return written


def as_json(result: Simulation) -> dict[str, Any]:
    """The contract's keys, then what was asked for. Peaks and actions are lists per rank."""
    plan, costs = result.plan, result.costs
    return {
        "makespan": result.makespan,
        "span": result.span,
        "ideal": result.ideal,
        "bubble_fraction": result.bubble_fraction,
        "bubble_over_ideal": result.bubble_over_ideal,
        "peak_activations": {
            "release_at_BW": list(result.peak_activations),
            "release_at_BI": list(result.peak_activations_input_gradient),
        },
        "actions": [[str(action) for action in row] for row in plan.actions],
        "schedule": plan.name,
        "stages": plan.ranks,
        "virtual_stages": _per_rank(result),
        "microbatches": plan.micro_batches,
        "placement": [list(ranks) for ranks in plan.placement],
        "costs": {field.name: getattr(costs, field.name) for field in fields(costs)},
        "busy": list(result.busy),
        "idle": [idle._asdict() for idle in result.idle],
        "exposed_p2p": list(result.exposed),
        "peak_bytes": list(result.peak_bytes),
        "critical_path": [
            {"rank": rank, "action": str(action), "start": start, "end": end}
            for rank, action, start, end in result.critical_path
        ],
    }


def as_text(result: Simulation, width: int, unit: str = "") -> str:
    """Totals, a table per rank, and the timeline."""
    plan, timeline = result.plan, result.timeline(unit)
    after = f" {unit}" if unit else ""
    lines = [
        f"{plan.name}: {_count(plan.ranks, 'rank')} × {_count(_per_rank(result), 'stage')}, "
        f"{_count(plan.micro_batches, 'micro-batch', 'es')}; valid",
        "",
        f"makespan             {result.makespan:.6g}{after}   first start to last end over all ranks",
        f"span                 {result.span:.6g}{after}   of the longest rank",
        f"ideal                {result.ideal:.6g}{after}   work of the busiest rank",
        f"bubble fraction      {result.bubble_fraction:.2%}   1 − ideal / makespan "
        f"({result.span_bubble_fraction:.2%} of the span)",
        f"bubble over ideal    {result.bubble_over_ideal:.2%}   makespan / ideal − 1",
        f"critical path        {_critical_path(result)}",
        "",
        *_table(result),
    ]
    return "\n".join([*lines, "", text(timeline, width), legend(timeline)])


def _table(result: Simulation) -> list[str]:
    """Per rank: work; idle time before, between and after its actions, and what of it is p2p; what it holds."""
    weighed = any(result.peak_bytes)
    lines = [
        "                             idle    waiting    activations held to" + "  bytes held" * weighed,
        "rank      busy     fill   steady    drain   for p2p   end of BW  end of BI"
        + "     at most" * weighed
        + "  stages",
    ]
    for rank, idle in enumerate(result.idle):
        held = f"{result.peak_activations[rank]:>12}{result.peak_activations_input_gradient[rank]:>11}"
        size = f"{result.peak_bytes[rank]:>12.4g}" if weighed else ""
        times = "".join(f" {time:>8.5g}" for time in idle)
        stages = ",".join(map(str, result.plan.stages_of(rank)))
        lines.append(f"{rank:>4}{result.busy[rank]:>10.6g}{times}{result.exposed[rank]:>10.5g}{held}{size}  {stages}")
    return lines


def _critical_path(result: Simulation) -> str:
    path = result.critical_path
    hops = sum(first.rank != second.rank for first, second in pairwise(path))
    ranks = len({event.rank for event in path})
    waited = result.makespan - sum(event.end - event.start for event in path)
    return (
        f"{_count(len(path), 'action')} on {_count(ranks, 'rank')}, from {path[0].action} to {path[-1].action}; "
        f"{_count(hops, 'hop')} take {max(waited, 0):.6g}"
        if path
        else "none"
    )


def _per_rank(result: Simulation) -> int:
    return max(len(result.plan.stages_of(rank)) for rank in range(result.plan.ranks))


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _aliases(entry: registry.Schedule) -> str:
    return f" (also {', '.join(entry.aliases)})" if entry.aliases else ""
