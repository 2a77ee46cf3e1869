"""A layout says where every element lies: once among owners, equal among replicas, padding nowhere."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from small import by_hand, config_of
from ultrascale.mesh.axes import AXES, Mesh
from ultrascale.models.family import load_family
from ultrascale.parallel.layout import Constant, Kind, Layout, Normal, Stored, Tie, Use
from ultrascale.parallel.module import Build, Module, stored_tensors

AXIS_CHOICES: tuple[tuple[str, ...], ...] = (
    (), ("tp",), ("kv_shard",), ("kv_replica",), ("ep",), ("cp", "tp"), ("ep", "cp"), ("kv_shard", "dp"),
)  # fmt: skip


def layout(shape: tuple[int, ...], split: dict[int, tuple[str, ...]], use: Use = Use.FEATURES, **more: Any) -> Layout:
    fields = {"tie": None, "init": Normal(1.0), "decay": True, "lr_scale": 1.0, "pad_to": {}, "name": "w"}
    return Layout(shape=shape, split=split, used_in=use, kind=Kind.MATRIX, **{**fields, **more})


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    kv_shard, kv_replica = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 4)]))
    sizes = {axis: draw(st.sampled_from([1, 1, 2, 3])) for axis in ("pp", "dp", "ep", "cp")}
    return Mesh(
        order=tuple(draw(st.permutations(AXES))),
        sizes={**sizes, "tp": kv_shard * kv_replica},
        factors={"tp": (("kv_shard", kv_shard), ("kv_replica", kv_replica))},
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    split: dict[int, tuple[str, ...]] = {}
    used: set[str] = set()
    for dim in range(len(shape)):
        axes = draw(st.sampled_from(AXIS_CHOICES))
        leaves = {leaf for axis in axes for leaf in (("kv_shard", "kv_replica") if axis == "tp" else (axis,))}
        if axes and not leaves & used:
            split[dim] = axes
            used |= leaves
    pad_to = {dim: draw(st.integers(1, 9)) for dim in range(len(shape)) if draw(st.booleans())}
    return layout(shape, split, draw(st.sampled_from(Use)), pad_to=pad_to)


def slices(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


@settings(max_examples=150, deadline=None)
@given(meshes(), layouts())
def test_owned_boxes_tile_the_tensor(mesh: Mesh, weight: Layout) -> None:
    """On every pipeline stage each element has one owner, and as many holders as the tensor has replicas there."""
    stages = mesh.sizes["pp"]
    held, owned = (np.zeros((stages, *weight.shape), dtype=int) for _ in range(2))
    for rank in range(mesh.world_size):
        stage = mesh.index(rank, ["pp"])
        offset, shape = weight.box(mesh, rank)
        assert all(0 <= o <= o + n <= size for o, n, size in zip(offset, shape, weight.shape, strict=True))
        held[stage][slices(offset, shape)] += 1
        owned[stage][slices(offset, shape)] += weight.is_owner(mesh, rank)
    assert (owned == 1).all()
    assert (held == mesh.size(weight.replica_axes(mesh))).all()


@settings(max_examples=100, deadline=None)
@given(meshes(), layouts())
def test_a_box_fits_the_memory_that_every_rank_has(mesh: Mesh, weight: Layout) -> None:
    """Memory is the same on all ranks, holds the padded tensor, and wastes less than a piece."""
    local = weight.local_shape(mesh)
    for rank in range(mesh.world_size):
        _, shape = weight.box(mesh, rank)
        assert all(n <= room for n, room in zip(shape, local, strict=True))
    for dim, size in enumerate(weight.shape):
        multiple = weight.pad_to.get(dim, 1)
        padded = -(-size // multiple) * multiple
        pieces = mesh.size(weight.split.get(dim, ()))
        assert padded <= local[dim] * pieces < padded + pieces
        assert weight.piece(dim, mesh) == local[dim]


@settings(max_examples=100, deadline=None)
@given(meshes(), layouts())
def test_replicas_hold_the_same_box_and_one_owns_it(mesh: Mesh, weight: Layout) -> None:
    for rank in range(mesh.world_size):
        copies = mesh.members(rank, weight.replica_axes(mesh))
        assert {weight.box(mesh, copy) for copy in copies} == {weight.box(mesh, rank)}
        assert sum(weight.is_owner(mesh, copy) for copy in copies) == 1


@settings(max_examples=100, deadline=None)
@given(meshes(), layouts())
def test_a_gradient_is_summed_over_copies_only(mesh: Mesh, weight: Layout) -> None:
    """Over axes that cut it ranks have different elements; over dp, ep and cp they always have different tokens."""
    gradient, replicas = set(weight.gradient_axes(mesh)), set(weight.replica_axes(mesh))
    cut = weight.split_axes(mesh)
    assert gradient <= replicas
    assert "pp" not in gradient | replicas
    assert {axis for axis in ("dp", "ep", "cp") if axis not in cut} <= gradient
    tensor = {"kv_shard", "kv_replica"} - cut
    assert gradient & tensor == (set() if weight.used_in is Use.WHOLE else tensor)


def axes_of(weight: Layout, mesh: Mesh) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return mesh.label(weight.gradient_axes(mesh)), mesh.label(weight.replica_axes(mesh))


def test_each_kind_of_parameter_is_summed_where_its_uses_are_divided() -> None:
    mesh = Mesh(
        sizes={"pp": 2, "dp": 2, "cp": 2, "ep": 2, "tp": 4},
        factors={"tp": (("kv_shard", 2), ("kv_replica", 2))},
    )
    batch = ("dp", "ep", "cp")
    matrix = (8, 8)
    cases = {
        "matrix cut over tp": (layout(matrix, {0: ("tp",)}), batch, batch),
        "kv head that several ranks hold": (
            layout(matrix, {0: ("kv_shard",)}), (*batch, "kv_replica"), (*batch, "kv_replica"),
        ),
        "norm on whole tokens": (layout((8,), {}, Use.WHOLE), batch, (*batch, "tp")),
        "norm on a rank's own tokens": (layout((8,), {}, Use.TOKENS), (*batch, "tp"), (*batch, "tp")),
        "norm inside heads": (layout((8,), {}, Use.FEATURES), (*batch, "tp"), (*batch, "tp")),
        "experts": (layout((4, 8, 8), {0: ("ep",), 1: ("tp",)}), ("dp", "cp"), ("dp", "cp")),
        "experts folded onto cp": (layout((4, 8, 8), {0: ("ep", "cp"), 2: ("tp",)}), ("dp",), ("dp",)),
        "experts folded onto cp and tp": (
            layout((8, 8, 8), {0: ("cp", "tp")}, Use.TOKENS), ("dp", "ep"), ("dp", "ep"),
        ),
    }  # fmt: skip
    for what, (weight, gradient, replicas) in cases.items():
        assert axes_of(weight, mesh) == (gradient, replicas), what


def test_replicated_kv_heads_are_those_that_their_query_heads_read() -> None:
    """Rank t's query heads [t·H/tp, (t+1)·H/tp) read kv heads that the rank holds, for every tp that is allowed."""
    for heads, kv_heads, tp in [(8, 2, 4), (8, 2, 8), (8, 4, 2), (8, 1, 4), (8, 8, 8), (12, 3, 6)]:
        overrides = {
            "model.num_attention_heads": heads,
            "model.num_key_value_heads": kv_heads,
            "model.head_dim": 2,
            "parallel.tp": tp,
        }
        mesh = Mesh.of(config_of(overrides, tp))
        q = layout((heads, 1), {0: ("tp",)})
        k = layout((kv_heads, 1), {0: ("kv_shard",)})
        for rank in range(tp):
            (q_start, _), (q_count, _) = q.box(mesh, rank)
            (k_start, _), (k_count, _) = k.box(mesh, rank)
            for local in range(q_count):
                wanted = (q_start + local) // (heads // kv_heads)
                assert k_start + local // (q_count // k_count) == wanted, (heads, kv_heads, tp, rank)


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 131, 257, 1000])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_padded_vocabulary_is_in_no_box(vocabulary: int, tp: int) -> None:
    mesh = Mesh(sizes={"tp": tp})
    weight = layout((vocabulary, 4), {0: ("tp",)}, pad_to={0: 128})
    rows = []
    for rank in range(tp):
        (start, _), (count, _) = weight.box(mesh, rank)
        rows += range(start, start + count)
    assert rows == list(range(vocabulary))
    memory = weight.piece(0, mesh) * tp
    assert memory % 128 == 0 or tp == 3
    assert memory >= vocabulary


# ---- stored tensors ---------------------------------------------------------------------------------------------


def test_members_lie_one_after_another_padding_included() -> None:
    mesh = Mesh(sizes={"tp": 2})
    stored = Stored((layout((6, 3), {0: ("tp",)}, name="a"), layout((5, 3), {0: ("tp",)}, pad_to={0: 4}, name="b")))
    assert stored.local_shape(mesh) == (3 + 4, 3)
    assert [(place.layout.name, place.row, place.rows) for place in stored.places(mesh)] == [("a", 0, 3), ("b", 3, 4)]


def test_stored_refuses_rows_of_different_shapes() -> None:
    mesh = Mesh(sizes={"tp": 2})
    for other in [layout((4, 5), {}, name="other"), layout((4,), {}, name="other"), layout((4, 4), {1: ("tp",)})]:
        stored = Stored((layout((4, 4), {}, name="first"), other))
        with pytest.raises(ValueError, match=f"first, {other.name} cannot be stored as one tensor"):
            stored.local_shape(mesh)


def test_stored_refuses_a_tie_beside_another_member() -> None:
    tied = layout((4, 4), {}, tie=Tie("t", ("a", "b")), name="tied")
    Stored((tied,))
    with pytest.raises(ValueError, match="a tied parameter is stored alone"):
        Stored((layout((4, 4), {}), tied))
    with pytest.raises(ValueError, match="at least one layout"):
        Stored(())


# ---- modules ----------------------------------------------------------------------------------------------------


def half() -> Build:
    """What the layers of the first of two tp ranks are built with."""
    return by_hand(config_of({"parallel.tp": 2}, 2), 0)


class _Bare(Module):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.scale = nn.Parameter(torch.ones(3))


class _Registered(Module):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.register_parameter("scale", nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("module", [_Bare, _Registered])
def test_a_module_refuses_a_bare_parameter(module: type[Module]) -> None:
    with pytest.raises(TypeError, match=f"{module.__name__}.scale: a parameter needs a Layout"):
        module(half())


class _Foreign(Module):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.inner = nn.Linear(2, 2)


def test_a_bare_parameter_inside_a_foreign_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"unit\.inner\.weight has no Layout"):
        list(stored_tensors([("unit", _Foreign(half()))]))


class _Declared(Module):
    def __init__(self, build: Build, tie: Tie | None) -> None:
        super().__init__(build)
        self.declare("weight", layout((6, 4), {0: ("tp",)}, tie=tie, init=Constant(0.0), name="word"))


def test_a_declared_parameter_has_its_local_shape_on_meta() -> None:
    module = _Declared(half(), None)
    weight = module.get_parameter("weight")
    assert tuple(weight.shape) == (3, 4)
    assert weight.device.type == "meta"
    assert weight.dtype == torch.float64
    assert [entry.attribute for entry in stored_tensors([("unit", module)])] == ["weight"]


def test_a_parameter_used_twice_needs_a_tie_and_is_one_stored_tensor() -> None:
    second = Module(half())
    with pytest.raises(ValueError, match="word is used twice but its layout says no tie"):
        second.share("weight", _Declared(half(), None), "weight")
    first = _Declared(half(), Tie("t", ("word", "head")))
    second.share("weight", first, "weight")
    entries = list(stored_tensors([("a", first), ("b", second)]))
    assert [(entry.units, entry.attribute) for entry in entries] == [(("a", "b"), "weight")]
    assert second.get_parameter("weight") is first.get_parameter("weight")


def test_every_element_of_a_model_is_owned_once() -> None:
    """The real layouts: over a world of tp=4 (kv heads held twice) × dp=2, owners count each element once."""
    config = config_of({"parallel.tp": 4, "parallel.dp": 2}, 8)
    family = load_family("llama")(config)
    owned: dict[str, np.ndarray] = {}
    for rank in range(8):
        build = by_hand(config, rank)
        stage = family.stage(build, range(2), embedding=True, head=True)
        for entry in stored_tensors(stage.units()):
            for weight in entry.stored.members:
                counts = owned.setdefault(weight.name, np.zeros(weight.shape, dtype=int))
                if weight.is_owner(build.mesh, rank):
                    counts[slices(*weight.box(build.mesh, rank))] += 1
    assert all((counts == 1).all() for counts in owned.values())
    assert sum(prod(counts.shape) for counts in owned.values()) == family.sizes().parameters
    assert len(owned) == 2 * 9 + 3
