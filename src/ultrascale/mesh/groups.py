"""The list of all communication groups of a run, before any exists. Needs no torch.

Every rank makes all of them at start, in the plan's order, and none later: a group that only its members make
gives wrong sums or hangs. Each use has a group of its own even where two cover the same ranks: operations of
one communicator run in the order in which they were issued, and a scalar should not queue behind a bucket,
nor a bucket behind a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ultrascale.mesh.axes import Mesh


@dataclass(frozen=True)
class GroupSpec:
    """One kind of group: all ranks that differ only in the leaves `axes`, and, given a `pipeline`, in pp.

    axes       leaves of the mesh, in its order
    pipeline   the pp coordinates that take part; ranks at other coordinates are in no group of this kind.
               None: the group stays within one pp coordinate, unless pp is one of its axes
    """

    axes: tuple[str, ...]
    pipeline: tuple[int, ...] | None = None

    def __str__(self) -> str:
        at = "" if self.pipeline is None else f" at pp {','.join(map(str, self.pipeline))}"
        return f"({', '.join(self.axes)}){at}"


def group_plan(
    mesh: Mesh,
    copies: Iterable[tuple[int, ...]] = (),
    whole_matrices: bool = False,
    experts: tuple[str, ...] | None = None,
) -> tuple[GroupSpec, ...]:
    """All kinds of groups that a run needs, in the order in which they are made.

    copies           sets of pp coordinates that hold copies of one parameter: ties over stages, a schedule's second
                     copies
    whole_matrices   whether the optimizer puts matrices together from all that the ranks at one pp coordinate hold
    experts          leaves over which experts, and the matrices inside of them, are cut; None: there are none
    Kinds that would hold one rank each are left out.
    """
    wanted = [
        GroupSpec(mesh.expand(mesh.order)),  # the world: norms, agreement on stopping, checkpoints
        GroupSpec(mesh.expand(["tp"])),  # activations
        GroupSpec(mesh.expand(["pp"])),  # messages between stages
        GroupSpec(mesh.expand(["dp", "ep", "cp"])),  # gradients: the replicas of a dense parameter
        GroupSpec(mesh.expand(["dp", "ep", "cp", "pp"])),  # sums of losses and denominators
    ]
    wanted += (GroupSpec((leaf,)) for leaf in ("cp_ring", "cp_ulysses") if leaf in mesh.leaves)  # keys, values, heads
    if "kv_replica" in mesh.leaves:
        wanted.append(GroupSpec(mesh.expand(["kv_replica"])))  # gradients of KV heads that several ranks hold
    if "dp_replicate" in mesh.leaves:
        wanted.append(GroupSpec(mesh.expand(["dp_shard", "ep", "cp"])))  # shards of parameters, gradients and state
        wanted.append(GroupSpec(mesh.expand(["dp_replicate"])))  # copies of a shard
    if experts is not None:
        wanted += _of_experts(mesh, experts)
    if whole_matrices:
        wanted.append(GroupSpec(mesh.expand(["dp", "ep", "cp", "tp"])))
    wanted += (GroupSpec((), pipeline=coordinates) for coordinates in copies)
    return tuple(dict.fromkeys(spec for spec in wanted if spec_size(mesh, spec) > 1))


def _of_experts(mesh: Mesh, experts: tuple[str, ...]) -> list[GroupSpec]:
    """For tokens on their way to experts, for tokens of the same rows, and for the replicas of an expert."""

    def left(axes: list[str]) -> GroupSpec:
        return GroupSpec(tuple(leaf for leaf in mesh.expand(axes) if leaf not in experts))

    specs = [GroupSpec(experts), GroupSpec(mesh.expand(["cp", "tp"])), left(["dp", "ep", "cp"])]
    if "dp_replicate" in mesh.leaves:
        specs += [left(["dp_shard", "ep", "cp"]), left(["dp_replicate"])]
    return specs


def spec_size(mesh: Mesh, spec: GroupSpec) -> int:
    """How many ranks each group of this kind has."""
    return mesh.size(spec.axes) * (1 if spec.pipeline is None else len(_pipeline(mesh, spec)))


def spec_members(mesh: Mesh, spec: GroupSpec, rank: int) -> tuple[int, ...]:
    """The ranks of this rank's group, in order; () when the rank is at a pp coordinate that takes no part."""
    if spec.pipeline is None:
        return mesh.members(rank, spec.axes)
    coordinates = _pipeline(mesh, spec)
    if mesh.coordinates(rank)["pp"] not in coordinates:
        return ()
    everywhere = mesh.members(rank, (*spec.axes, "pp"))
    return tuple(member for member in everywhere if mesh.index(member, ["pp"]) in coordinates)


def spec_groups(mesh: Mesh, spec: GroupSpec) -> list[tuple[int, ...]]:
    """All groups of this kind, sorted by their first rank."""
    if spec.pipeline is None:
        return mesh.groups(spec.axes)
    wide = mesh.groups((*spec.axes, "pp"))
    coordinates = _pipeline(mesh, spec)
    return [tuple(rank for rank in ranks if mesh.index(rank, ["pp"]) in coordinates) for ranks in wide]


def describe(mesh: Mesh, plan: tuple[GroupSpec, ...]) -> list[dict[str, Any]]:
    """The plan for a run's manifest: of each kind its axes, pp coordinates, size and number of groups."""
    return [
        {
            "axes": list(chain(mesh.label(spec.axes), ["pp"] if spec.pipeline else [])),
            "pipeline": None if spec.pipeline is None else list(spec.pipeline),
            "size": spec_size(mesh, spec),
            "groups": len(spec_groups(mesh, spec)),
        }
        for spec in plan
    ]


def _pipeline(mesh: Mesh, spec: GroupSpec) -> tuple[int, ...]:
    """The pp coordinates of a spec, checked."""
    coordinates = spec.pipeline or ()
    stages = mesh.sizes["pp"]
    if "pp" in spec.axes:
        raise ValueError(f"the group {spec} names pp and lists its coordinates: one or the other")
    if not coordinates or list(coordinates) != sorted(set(coordinates) & set(range(stages))):
        raise ValueError(f"the group {spec} needs ascending pp coordinates within 0 … {stages - 1}")
    return coordinates
