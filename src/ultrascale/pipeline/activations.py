"""How many activations a rank holds, and their bytes, which the order alone decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ultrascale.pipeline.actions import RECEIVES, Action, Kind, Plan
from ultrascale.pipeline.communication import insert_communication
from ultrascale.pipeline.costs import Cost, Costs, at

Release = Literal["BW", "BI"]
"""When an activation (stage × micro-batch) is let go: at the end of B or BW, or already of B or BI."""


def live_activations(plan: Plan, rank: int, release: Release = "BW") -> Iterator[tuple[int, Action, int]]:
    """(index, action, activations held while it runs) of the rank's compute actions.

    An activation is held from the start of its F; a forward-only plan lets it go at the end of the F.
    """
    releasing = {Kind.F} if plan.forward_only else {Kind.B, Kind.BW if release == "BW" else Kind.BI}
    live = 0
    for index, action in enumerate(plan.actions[rank]):
        parts = action.computes
        if not parts:
            continue
        for part in parts:
            if part.kind is Kind.F:
                live += 1
        yield index, action, live
        for part in parts:
            if part.kind in releasing:
                live -= 1


def peak_activations(plan: Plan, release: Release = "BW") -> tuple[int, ...]:
    """The most activations (stage × micro-batch) that each rank holds at once."""
    return tuple(_peak(plan, actions, Kind.BW if release == "BW" else Kind.BI) for actions in plan.actions)


def _peak(plan: Plan, actions: tuple[Action, ...], release: Kind) -> int:
    """As live_activations counts, but quickly: a plan has hundreds of thousands of actions."""
    if plan.forward_only:
        return int(any(action.kind is Kind.F for action in actions))
    live = peak = 0
    for action in actions:
        kind = action.kind
        if kind is Kind.F or kind is Kind.FB:
            live += 1
            if live > peak:
                peak = live
            if kind is Kind.FB and action.parts[1].kind in (Kind.B, release):
                live -= 1
        elif kind is Kind.B or kind is release:
            live -= 1
    return peak


def peak_bytes(plan: Plan, costs: Costs) -> tuple[float, ...]:
    """The most bytes that each rank holds at once, of what the costs give sizes for.

    ACTIVATION of a stage from the start of its F to the end of its B or BI, HELD from there to the end of its BW, and
    MESSAGE from the posting of a receive: of an activation to the F that takes it over, of a gradient to the end of
    the backward that uses it. Plans without messages get those that the engine would run.
    """
    if not any(map(_any, (costs.ACTIVATION, costs.held, costs.MESSAGE))):
        return (0,) * plan.ranks
    if costs.MESSAGE and "communication" not in plan.passes:
        plan = insert_communication(plan)
    return tuple(_peak_bytes(plan, costs, rank) for rank in range(plan.ranks))


def _peak_bytes(plan: Plan, costs: Costs, rank: int) -> float:
    live: float = 0
    peak: float = 0
    received: set[tuple[Kind, int, int]] = set()  # receives whose buffer is still one
    for action in plan.actions[rank]:
        if action.kind in RECEIVES:
            received.add((action.kind, action.stage, action.micro_batch))
            live += costs.MESSAGE
        freed: float = 0
        for part in action.computes:
            stage, key = part.stage, (part.stage, part.micro_batch)
            if part.kind is Kind.F:
                live += at(costs.ACTIVATION, stage)
                if (Kind.RECV_F, *key) in received:
                    live -= costs.MESSAGE
                freed += at(costs.ACTIVATION, stage) if plan.forward_only else 0
            elif part.kind is Kind.BW:
                freed += at(costs.held, stage)
            else:
                freed += at(costs.ACTIVATION, stage) - (at(costs.held, stage) if part.kind is Kind.BI else 0)
                freed += costs.MESSAGE if (Kind.RECV_B, *key) in received else 0
        peak = max(peak, live)
        live -= freed
    return peak


def _any(cost: Cost) -> bool:
    return any(cost) if isinstance(cost, tuple) else bool(cost)
