"""Plans of the user: stages on ranks that no schedule of the tree puts them on, and files that differ between hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cells import Cell, check

from pool import Context, pool
from small import config_of
from ultrascale.assembly import PlanError, check_plan
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import group_plan

RING = [[0, 1], [1, 2], [2, 3], [3, 0]]
"""Stage → its two holders: micro-batch m runs on the (m % 2)-th of each."""


def ring(path: Path, micro_batches: int) -> Path:
    """All forwards by stage, then all backwards; every rank shares stages with both of its neighbours."""
    rows: list[list[str]] = [[] for _ in range(4)]
    for kind, stages in (("F", range(4)), ("B", range(3, -1, -1))):
        for stage in stages:
            for micro_batch in range(micro_batches):
                rows[RING[stage][micro_batch % 2]].append(f"{kind}{stage}.{micro_batch}")
    path.write_text(json.dumps({"placement": RING, "microbatches": micro_batches, "actions": rows}))
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_copies_and_ties_that_overlap_are_summed_in_one_order_everywhere(tied: bool, tmp_path: Path) -> None:
    """The tie's holders are three ranks, and each pair of neighbours holds copies: another order on each would hang."""
    plan = ring(tmp_path / "ring.json", 4)
    check(Cell(4, {
        "parallel.pp": 4, "pipeline.schedule": f"custom:{plan}", "model.tie_word_embeddings": tied,
        "batch.micro_size": 2, "batch.global_size": 8,
    }))  # fmt: skip


def _compared(context: Context, schedules: list[str]) -> str:
    mesh = Mesh(sizes={"pp": 2})
    config = config_of({"parallel.pp": 2, "pipeline.schedule": schedules[context.rank]}, 2)
    try:
        check_plan(config, context.groups(mesh, group_plan(mesh)).world)
    except PlanError as error:
        return str(error)
    return ""


def test_ranks_with_different_plans_are_refused_on_all_of_them() -> None:
    assert pool(2).run(_compared, ["1f1b", "1f1b"]) == ["", ""]
    said = pool(2).run(_compared, ["1f1b", "gpipe"])
    assert all("another plan on rank" in text for text in said)
