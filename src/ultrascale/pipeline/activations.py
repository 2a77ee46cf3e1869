"""How many activations a rank holds, which the order alone decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ultrascale.pipeline.actions import Action, Kind, Plan

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
    return tuple(
        max((live for _, _, live in live_activations(plan, rank, release)), default=0) for rank in range(plan.ranks)
    )
