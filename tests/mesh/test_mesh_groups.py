"""The plan of all groups of a run."""

from __future__ import annotations

import json

import pytest

from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import GroupSpec, describe, group_plan, spec_groups, spec_members

KV = {"tp": (("kv_shard", 1), ("kv_replica", 2))}
MESHES = [
    Mesh(),
    Mesh(sizes={"dp": 4}),
    Mesh(sizes={"tp": 2, "pp": 2}, factors=KV),
    Mesh(sizes={"tp": 2, "pp": 4, "dp": 2, "cp": 2}, factors=KV),
    Mesh(["tp", "cp", "ep", "dp", "pp"], {"pp": 3, "dp": 2, "ep": 2, "tp": 2}, KV),
]


def tied(mesh: Mesh) -> list[tuple[int, ...]]:
    """The pp coordinates that hold copies of tied embeddings: the first and the last stage."""
    return [tuple(sorted({0, mesh.sizes["pp"] - 1}))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_derives_the_same_groups(mesh: Mesh) -> None:
    for spec in group_plan(mesh, tied(mesh)):
        groups = spec_groups(mesh, spec)
        held = {rank: group for group in groups for rank in group}
        assert len(held) == sum(map(len, groups)), f"{spec} holds a rank twice"
        for rank in range(mesh.world_size):
            assert spec_members(mesh, spec, rank) == held.get(rank, ()), (spec, rank)
        assert all(group == tuple(sorted(group)) for group in groups)
        assert groups == sorted(groups)


def test_groups_of_one_rank_are_left_out() -> None:
    assert group_plan(Mesh(), tied(Mesh())) == ()
    for mesh in MESHES:
        assert all(len(spec_groups(mesh, spec)[0]) > 1 for spec in group_plan(mesh, tied(mesh)))


def test_the_plan_holds_what_a_dense_run_reduces_over() -> None:
    mesh = Mesh(sizes={"tp": 2, "pp": 4, "dp": 2}, factors=KV)
    plan = group_plan(mesh, tied(mesh))
    assert plan == (
        GroupSpec(("pp", "dp", "ep", "cp", "kv_shard", "kv_replica")),
        GroupSpec(("kv_shard", "kv_replica")),
        GroupSpec(("pp",)),
        GroupSpec(("dp", "ep", "cp")),
        GroupSpec(("pp", "dp", "ep", "cp")),
        GroupSpec(("kv_replica",)),
        GroupSpec((), pipeline=(0, 3)),
    )
    assert group_plan(mesh) == plan[:-1]


def test_a_tie_joins_the_first_and_the_last_stage_only() -> None:
    mesh = Mesh(sizes={"pp": 4, "tp": 2})
    tie = GroupSpec((), pipeline=(0, 3))
    assert spec_groups(mesh, tie) == [(0, 6), (1, 7)]
    assert spec_members(mesh, tie, 7) == (1, 7)
    assert spec_members(mesh, tie, 2) == ()
    assert spec_groups(mesh, GroupSpec(("tp",), pipeline=(1, 2))) == [(2, 3, 4, 5)]


@pytest.mark.parametrize(
    "spec", [GroupSpec((), (0, 4)), GroupSpec((), (3, 0)), GroupSpec(("pp",), (0, 3)), GroupSpec((), ())]
)
def test_impossible_pipeline_coordinates_are_refused(spec: GroupSpec) -> None:
    with pytest.raises(ValueError, match="pp"):
        spec_groups(Mesh(sizes={"pp": 4}), spec)


def test_the_plan_can_be_written_to_a_manifest() -> None:
    mesh = Mesh(sizes={"pp": 4, "tp": 2}, factors=KV)
    written = json.loads(json.dumps(describe(mesh, group_plan(mesh, tied(mesh)))))
    assert {"axes": ["tp"], "pipeline": None, "size": 2, "groups": 4} in written
    assert written[-1] == {"axes": ["pp"], "pipeline": [0, 3], "size": 2, "groups": 2}
