"""`ultrascale schedule`: validates a schedule, simulates it and draws it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ultrascale.pipeline.actions import ScheduleError
from ultrascale.pipeline.costs import parse_costs
from ultrascale.pipeline.draw import LEGEND, timeline
from ultrascale.pipeline.program import program
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import Simulation, simulate

_DEFAULT_COSTS = "F=1,BI=1,BW=1,P2P=0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments, description and example of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Validate a pipeline schedule, simulate it, and draw it. Schedules:\n" + "\n".join(
        f"  {entry.name:<12} {entry.summary}{_aliases(entry)}" for entry in registry.SCHEDULES
    )
    parser.epilog = "example:\n  ultrascale schedule 1f1b --stages 4 --microbatches 8 --cost F=1,BI=1,BW=1,P2P=0.1"
    parser.add_argument("name", metavar="NAME", help="schedule, see above")
    parser.add_argument("--stages", metavar="P", type=int, required=True, help="ranks of the pipeline")
    parser.add_argument("--microbatches", metavar="M", type=int, required=True, help="micro-batches per step")
    parser.add_argument("--virtual", metavar="V", type=int, help="stages per rank (default: the schedule's own)")
    parser.add_argument(
        "--cost",
        default=_DEFAULT_COSTS,
        help="time of a forward, of the gradients of input and weights, of a message, and of an overlapped "
        f"pair (FB=…), per stage and micro-batch (default: {_DEFAULT_COSTS})",
    )
    parser.add_argument("--width", type=int, default=100, help="columns of the timeline (default: 100)")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 2 when the schedule does not exist or does not take these numbers."""
    try:
        plan = program(args.name, args.stages, args.microbatches, args.virtual)
        result = simulate(plan, parse_costs(args.cost))
    except ScheduleError as error:
        print(f"ultrascale schedule: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(result)) if args.json else as_text(result, max(args.width, 10)))
    return 0


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
        "costs": {"F": costs.F, "BI": costs.BI, "BW": costs.BW, "P2P": costs.P2P, "FB": costs.FB},
    }


def as_text(result: Simulation, width: int) -> str:
    """Totals, a table per rank, and the timeline."""
    plan = result.plan
    lines = [
        f"{plan.name}: {_count(plan.ranks, 'rank')} × {_count(_per_rank(result), 'stage')}, "
        f"{_count(plan.micro_batches, 'micro-batch', 'es')}; valid",
        "",
        f"makespan             {result.makespan:.6g}   first start to last end over all ranks",
        f"span                 {result.span:.6g}   of the longest rank",
        f"ideal                {result.ideal:.6g}   work of the busiest rank",
        f"bubble fraction      {result.bubble_fraction:.2%}   1 − ideal / makespan "
        f"({result.span_bubble_fraction:.2%} of the span)",
        f"bubble over ideal    {result.bubble_over_ideal:.2%}   makespan / ideal − 1",
        "",
        "                                 activations held at most",
        "rank      busy      idle  actions  to end of B, BW  to end of B, BI  stages",
    ]
    for rank in range(plan.ranks):
        stages = ",".join(map(str, plan.stages_of(rank)))
        lines.append(
            f"{rank:>4} {result.busy[rank]:>9.6g} {result.makespan - result.busy[rank]:>9.6g} "
            f"{len(plan.actions[rank]):>8} {result.peak_activations[rank]:>16} "
            f"{result.peak_activations_input_gradient[rank]:>16}  {stages}"
        )
    return "\n".join([*lines, "", timeline(result, width), LEGEND])


def _per_rank(result: Simulation) -> int:
    return max(len(result.plan.stages_of(rank)) for rank in range(result.plan.ranks))


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _aliases(entry: registry.Schedule) -> str:
    return f" (also {', '.join(entry.aliases)})" if entry.aliases else ""
