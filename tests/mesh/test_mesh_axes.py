"""Ranks, coordinates and group membership."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.mesh.axes import AXES, Mesh

# Order tp-cp-ep-dp-pp of Megatron (fastest first) is our default, read from the other end.
SIXTEEN = Mesh(sizes={"tp": 2, "cp": 2, "dp": 2, "pp": 2})


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    shards = draw(st.sampled_from([d for d in (1, 2, 3) if sizes["tp"] % d == 0]))
    factors = {"tp": (("kv_shard", shards), ("kv_replica", sizes["tp"] // shards))}
    return Mesh(draw(st.permutations(AXES)), sizes, factors)


@pytest.mark.parametrize(
    ("axes", "first"),
    [
        (["tp"], [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]),
        (["cp"], [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]),
        (["dp"], [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12)]),
        (["dp", "cp"], [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]),
        (["pp"], [(0, 8), (1, 9), (2, 10), (3, 11), (4, 12), (5, 13), (6, 14), (7, 15)]),
        (["tp", "pp"], [(0, 1, 8, 9), (2, 3, 10, 11)]),
        # Experts folded over cp and tp (Megatron's expert view with ETP1 EP4 EDP2): ep, edp, tp-ep-pp.
        (["cp", "tp"], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (["pp", "cp", "tp"], [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
    ],
)
def test_groups_match_the_golden_tables_of_megatron(axes: list[str], first: list[tuple[int, ...]]) -> None:
    groups = SIXTEEN.groups(axes)
    assert groups[: len(first)] == first
    assert sorted(rank for group in groups for rank in group) == list(range(16))


def test_another_order_moves_the_groups() -> None:
    mesh = Mesh(["dp", "pp", "ep", "cp", "tp"], {"tp": 2, "cp": 2, "dp": 2, "pp": 2})
    assert mesh.groups(["pp"])[:4] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups(["dp"])[:2] == [(0, 8), (1, 9)]
    assert mesh.leaves == ("dp", "pp", "ep", "cp", "tp")


@settings(max_examples=60, deadline=None)
@given(meshes(), st.data())
def test_membership_index_and_coordinates_agree(mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    axes = data.draw(st.lists(st.sampled_from([*mesh.order, *mesh.leaves]), unique=True))
    coordinates = mesh.coordinates(rank)
    assert mesh.rank_of(coordinates) == rank
    assert mesh.rank_of({leaf: coordinates[leaf] for leaf in mesh.leaves}) == rank
    assert coordinates["tp"] == coordinates["kv_shard"] * mesh.size(["kv_replica"]) + coordinates["kv_replica"]

    members = mesh.members(rank, axes)
    assert members[mesh.index(rank, axes)] == rank
    assert len(members) == mesh.size(axes)
    assert [mesh.index(member, axes) for member in members] == list(range(len(members)))
    # Definition, the slow way: the ranks that differ only in these leaves.
    kept = [leaf for leaf in mesh.leaves if leaf not in mesh.expand(axes)]
    same = [
        other
        for other in range(mesh.world_size)
        if all(mesh.coordinates(other)[leaf] == coordinates[leaf] for leaf in kept)
    ]
    assert list(members) == same
    assert members in mesh.groups(axes)


def test_the_whole_world_is_covered_once_by_every_kind_of_group() -> None:
    mesh = Mesh(sizes={"pp": 3, "dp": 2, "tp": 4}, factors={"tp": (("kv_shard", 2), ("kv_replica", 2))})
    for axes in (["kv_shard"], ["kv_replica"], ["pp", "kv_shard"], [], list(AXES)):
        ranks = [rank for group in mesh.groups(axes) for rank in group]
        assert sorted(ranks) == list(range(24)), axes


def test_kv_heads_are_sharded_first_and_replicated_when_tp_is_larger() -> None:
    def mesh(tp: int, heads: int) -> Mesh:
        parallel = SimpleNamespace(order=list(AXES), dp=1, dp_shard=None, tp=tp, cp=1, pp=1, ep=1)
        return Mesh.of(SimpleNamespace(parallel=parallel, model=SimpleNamespace(num_key_value_heads=heads)))

    eight = mesh(8, 2)
    assert eight.groups(["kv_shard"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert eight.groups(["kv_replica"]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh(2, 8).size(["kv_replica"]) == 1
    with pytest.raises(ValueError, match=r"parallel\.tp=4 neither divides .*num_key_value_heads=3"):
        mesh(4, 3)


def test_a_hundred_thousand_ranks_are_described_within_a_second() -> None:
    sizes = {"pp": 5, "dp": 625, "ep": 2, "cp": 2, "tp": 8}
    mesh = Mesh(sizes=sizes, factors={"tp": (("kv_shard", 4), ("kv_replica", 2))})
    assert mesh.world_size == 100_000
    start = time.process_time()
    described = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    groups = [mesh.groups([axis]) for axis in mesh.order]
    assert time.process_time() - start < 1.0
    assert len({tuple(coordinates.values()) for coordinates in described}) == 100_000
    assert [len(kind) for kind in groups] == [100_000 // sizes[axis] for axis in mesh.order]


def test_a_label_names_what_really_differs() -> None:
    mesh = Mesh(sizes={"dp": 2, "tp": 4}, factors={"tp": (("kv_shard", 2), ("kv_replica", 2))})
    assert mesh.label(AXES) == ("dp", "tp")
    assert mesh.label(["tp"]) == ("tp",)
    assert mesh.label(["kv_replica", "dp"]) == ("dp", "kv_replica")
    assert mesh.label(["pp", "cp"]) == ()
    alone = Mesh(sizes={"tp": 4}, factors={"tp": (("kv_shard", 1), ("kv_replica", 4))})
    assert alone.label(["kv_replica"]) == ("tp",)


def test_equal_meshes_are_one_key_and_survive_pickling() -> None:
    mesh = Mesh(sizes={"tp": 2, "dp": 3}, factors={"tp": [("kv_shard", 2), ("kv_replica", 1)]})
    copy = pickle.loads(pickle.dumps(mesh))
    assert {mesh: 1}[copy] == 1
    assert copy.groups(["dp"]) == mesh.groups(["dp"])
    assert mesh != Mesh(sizes={"tp": 2, "dp": 3})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mesh(["pp", "dp"], {}), "permutation"),
        (lambda: Mesh(sizes={"tp": 0}), "tp=0"),
        (lambda: Mesh(sizes={"xp": 2}), "xp"),
        (lambda: Mesh(factors={"xp": (("a", 1),)}), "xp"),
        (lambda: Mesh(sizes={"tp": 4}, factors={"tp": (("a", 2), ("b", 3))}), "tp=4 is not a=2 × b=3"),
        (lambda: Mesh(sizes={"tp": 4}, factors={"tp": (("dp", 2), ("b", 2))}), "repeat"),
        (lambda: SIXTEEN.coordinates(16), "rank 16 is outside 0 … 15"),
        (lambda: SIXTEEN.expand(["kv_shard"]), "kv_shard"),
        (lambda: SIXTEEN.rank_of({"pp": 0, "dp": 0, "cp": 0}), "where on tp"),
        (lambda: SIXTEEN.rank_of({"pp": 2, "dp": 0, "cp": 0, "tp": 0}), "pp=2 is outside 0 … 1"),
    ],
)
def test_what_does_not_fit_is_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def test_enumerating_ranks_and_groups_imports_no_torch() -> None:
    modules = ["mesh.axes", "mesh.groups", "mesh.factorise", "mesh.check", "comm.ledger", "comm.group"]
    code = "import sys, " + ", ".join(f"ultrascale.{m}" for m in modules) + "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
