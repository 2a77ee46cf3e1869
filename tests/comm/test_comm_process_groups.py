"""Groups made on real ranks are the ones that were planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pool import Context, pool
from ultrascale.comm import collectives
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import GroupSpec, group_plan, spec_members

KV = {"tp": (("kv_shard", 1), ("kv_replica", 2))}
MESHES = [
    Mesh(sizes={"tp": 2}, factors=KV),
    Mesh(sizes={"pp": 4}),
    Mesh(["tp", "cp", "ep", "dp", "pp"], {"dp": 2, "pp": 2}),
    Mesh(sizes={"pp": 2, "dp": 2, "tp": 2}, factors=KV),
]


def tied(mesh: Mesh) -> list[tuple[int, ...]]:
    """The pp coordinates that hold copies of tied embeddings: the first and the last stage."""
    return [tuple(sorted({0, mesh.sizes["pp"] - 1}))]


def _sum_of_ranks(context: Context, mesh: Mesh) -> list[tuple[tuple[int, ...], tuple[str, ...], float]]:
    plan = group_plan(mesh, tied(mesh))
    groups = context.groups(mesh, plan)
    seen = []
    for spec in plan:
        if not spec_members(mesh, spec, context.rank):
            with pytest.raises(LookupError, match="not in the group"):
                groups.of(spec.axes, spec.pipeline)
            continue
        group = groups.of(spec.axes, spec.pipeline)
        total = torch.tensor(2.0**context.rank, dtype=torch.float64)
        collectives.all_reduce(total, group).wait()
        assert group.ranks[group.index] == context.rank
        seen.append((group.ranks, group.axes, total.item()))
    assert len(context.ledger.rows) == len(seen)
    return seen


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_group_sums_over_exactly_its_planned_ranks(mesh: Mesh) -> None:
    plan = group_plan(mesh, tied(mesh))
    for rank, seen in enumerate(pool(mesh.world_size).run(_sum_of_ranks, mesh)):
        planned = [members for spec in plan if (members := spec_members(mesh, spec, rank))]
        assert [ranks for ranks, _, _ in seen] == planned
        assert [total for _, _, total in seen] == [sum(2.0**r for r in ranks) for ranks in planned]


def _look_up(context: Context, mesh: Mesh) -> dict[str, Any]:
    plan = group_plan(mesh, tied(mesh))
    groups = context.groups(mesh, plan)
    again = context.groups(mesh, plan)
    with pytest.raises(LookupError, match=r"no group \(dp, ep, cp, tp\) was planned"):
        groups.of(["dp", "ep", "cp", "tp"])
    with pytest.raises(ValueError, match=r"needs 3 ranks, and torch\.distributed has 8"):
        create(Mesh(sizes={"tp": 3}), (), Ledger())
    return {
        "one": groups.of(["cp"]).size,
        "by its real axes": groups.of(["dp"]) == groups.of(["dp", "ep", "cp"]),
        "same process group": groups.of(["tp"]).process_group is again.of(["tp"]).process_group,
        "own process group": groups.of(["dp"]).process_group is not groups.world.process_group,
        "same ledger": groups.of(["tp"]).ledger is context.ledger,
        "world": groups.world.ranks,
    }


def test_groups_are_found_by_axes_and_kept_for_the_next_cell() -> None:
    mesh = Mesh(sizes={"pp": 2, "dp": 2, "tp": 2})
    for found in pool(8).run(_look_up, mesh):
        assert found.pop("world") == tuple(range(8))
        assert found.pop("one") == 1
        assert all(found.values()), found


def _world_and_replicas(context: Context) -> bool:
    mesh = Mesh(sizes={"dp": 2})
    groups = context.groups(mesh, group_plan(mesh, tied(mesh)))
    return groups.world.process_group is not groups.of(["dp", "ep", "cp"]).process_group


def test_groups_of_the_same_ranks_for_different_uses_do_not_queue_behind_each_other() -> None:
    assert pool(2).run(_world_and_replicas) == [True, True]


def test_one_rank_needs_no_process_group() -> None:
    mesh = Mesh()
    groups = create(mesh, group_plan(mesh, tied(mesh)), Ledger())
    x = torch.arange(3.0)
    assert collectives.all_reduce(x, groups.world).wait() is x
    assert collectives.all_gather(x, groups.of(["tp"])).wait() is x
    assert groups.of((), pipeline=(0,)).size == 1
    assert groups.ledger.rows == []
    assert list(groups) == []


def test_a_plan_is_hashable_with_its_mesh() -> None:
    one, other = (hash((MESHES[0], group_plan(MESHES[0], tied(MESHES[0])))) for _ in range(2))
    assert one == other
    assert GroupSpec(("tp",)) != GroupSpec(("tp",), (0,))
