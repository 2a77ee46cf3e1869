"""Makes the process groups of a plan, on every rank, in the plan's order.

They are made with `torch.distributed.new_group` from the torch-free plan and not through a DeviceMesh,
because a DeviceMesh makes groups for axes of size 1 and cannot restrict a group to listed pp coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import GroupSpec, spec_groups, spec_size


class Groups:
    """The groups of one rank. Look one up by its axes, and pass it on: no module finds a group by itself."""

    def __init__(self, mesh: Mesh, rank: int, groups: dict[GroupSpec, Group | None], ledger: Ledger) -> None:
        self.mesh = mesh
        self.rank = rank
        self.ledger = ledger
        self._groups = groups  # None: this rank is in no group of that kind
        self._alone = Group(axes=(), ranks=(rank,), index=0, process_group=None, ledger=ledger)

    def of(self, axes: Iterable[str], pipeline: Iterable[int] | None = None) -> Group:
        """This rank's group over these axes, and, where `pipeline` is given, over these pp coordinates.

        A group of size 1 costs nothing and always exists. Axes of size 1 do not matter: `("dp",)` finds the
        group of `("dp", "ep", "cp")` when ep = cp = 1, but one planned under just these axes comes first.
        Raises LookupError when no such group was planned, or this rank is not in one.
        """
        spec = GroupSpec(self.mesh.expand(axes), None if pipeline is None else tuple(pipeline))
        if spec_size(self.mesh, spec) == 1 and (spec.pipeline is None or self._pp in spec.pipeline):
            return self._alone
        if spec not in self._groups:
            same = [s for s in self._groups if s.pipeline == spec.pipeline and self._real(s) == self._real(spec)]
            if not same:
                planned = "; ".join(map(str, self._groups)) or "none"
                raise LookupError(f"no group {spec} was planned for {self.mesh}; planned: {planned}")
            spec = same[0]
        group = self._groups[spec]
        if group is None:
            raise LookupError(f"rank {self.rank} of {self.mesh} is at pp {self._pp}, not in the group {spec}")
        return group

    @property
    def world(self) -> Group:
        """The group of all ranks."""
        return self.of(self.mesh.order)

    def with_ledger(self, ledger: Ledger) -> Groups:
        """The same process groups, writing to another ledger."""
        groups = {spec: group and group.with_ledger(ledger) for spec, group in self._groups.items()}
        return Groups(self.mesh, self.rank, groups, ledger)

    def destroy(self) -> None:
        """Frees the process groups; every rank must do it. The default process group stays."""
        for group in self._groups.values():
            if group is not None and group.process_group is not dist.group.WORLD:
                dist.destroy_process_group(group.process_group)
        self._groups = {}

    def __iter__(self) -> Iterator[Group]:
        """The groups of more than one rank that this rank is in, in the plan's order."""
        return (group for group in self._groups.values() if group is not None)

    @property
    def _pp(self) -> int:
        return self.mesh.index(self.rank, ["pp"])

    def _real(self, spec: GroupSpec) -> tuple[str, ...]:
        return tuple(axis for axis in spec.axes if self.mesh.size([axis]) > 1)


def beside_training(world: Group) -> Group:
    """The ranks of the world once more, on gloo, with connections and a ledger of their own; collective.

    For what runs in another thread than training, whose calls stand in no order to training's. A rank that is slow is
    waited for as long as it takes; one that died breaks the connection.
    """
    if world.size == 1:
        return world.with_ledger(Ledger())
    made = dist.new_group(list(world.ranks), backend="gloo", timeout=timedelta(days=7))
    return replace(world, process_group=made, ledger=Ledger())


def end(group: Group) -> None:
    """Frees the connections of a group that `beside_training` made."""
    if group.process_group is not None:
        dist.destroy_process_group(group.process_group)


def create(mesh: Mesh, plan: tuple[GroupSpec, ...], ledger: Ledger, timeout_seconds: float | None = None) -> Groups:
    """Makes every group of the plan; all ranks of the world call it with the same mesh and plan.

    timeout_seconds   after which an operation on a group that some rank does not join fails; None: the
                      backend's default
    Raises ValueError when the world of torch.distributed is not the mesh's. A mesh of one rank needs no
    torch.distributed.
    """
    running = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    if world != mesh.world_size:
        raise ValueError(f"{mesh} needs {mesh.world_size} ranks, and torch.distributed has {world}")
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    groups: dict[GroupSpec, Group | None] = {}
    for spec in plan:
        groups[spec] = None
        for ranks in spec_groups(mesh, spec):
            # The default process group is there already and holds all ranks in order.
            whole = len(ranks) == world and spec.axes == mesh.leaves
            made = dist.group.WORLD if whole else dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                axes = mesh.label(spec.axes if spec.pipeline is None else (*spec.axes, "pp"))
                groups[spec] = Group(axes, ranks, ranks.index(rank), made, ledger)
    return Groups(mesh, rank, groups, ledger)
