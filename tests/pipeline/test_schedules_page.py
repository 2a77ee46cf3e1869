"""The table of docs/schedules.md says what the simulator says."""

from __future__ import annotations

import re
from pathlib import Path

from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import simulate

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def row(name: str) -> str:
    """Of 8 ranks and 16 micro-batches, in units of one of eight stages. A rank of dualpipe has two whole stages, each
    of which runs half of the micro-batches."""
    plan = registry.build(name, 8, 16)
    copies = len(plan.placement[0])
    chunks = plan.stages // plan.ranks
    free, slow = simulate(plan), simulate(plan, Costs(P2P=0.1 * chunks))
    cells = (
        f"`{name}`",
        len(plan.stages_of(0)),
        f"{free.makespan / chunks:g}",
        f"{free.bubble_fraction:.1%}",
        f"{free.bubble_over_ideal:.1%}",
        f"{slow.makespan / chunks:.4g}",
        f"{max(free.peak_activations) / chunks:g}",
        copies,
    )
    return f"| {' | '.join(map(str, cells))} |"


def test_table_of_the_page_is_what_the_simulator_says() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| `\w+` \|", line)]
    assert len(rows) >= 11
    assert rows == [row(line.split("`")[1]) for line in rows]
