"""Which ranks hold which experts, and who of them sees a token. Needs no torch.

The experts of a layer are cut over `parallel.expert_axes`; the matrices inside an expert over
`parallel.expert_tensor_axes`. Both may be axes that dense layers use for something else (MoE parallel folding, Liu et
al. 2025). Tokens travel within the group over both: a copy of a token goes to every rank that holds a part of its
expert, and what those make of it is added up where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.layout import BATCH_AXES


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts' axes, as leaves of the mesh."""

    expert_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]

    @staticmethod
    def of(config: Any, mesh: Mesh) -> Placement:
        """Of a resolved config."""
        parallel = config.parallel
        return Placement(mesh.expand(parallel.expert_axes), mesh.expand(parallel.expert_tensor_axes))

    def group_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Over which tokens travel."""
        return mesh.expand((*self.expert_axes, *self.tensor_axes))

    def replicas(self, mesh: Mesh) -> tuple[str, ...]:
        """Leaves of the batch over which an expert has copies: where its gradients are summed."""
        return tuple(leaf for leaf in mesh.expand(BATCH_AXES) if leaf not in self.group_axes(mesh))

    def holders(self, mesh: Mesh, rank: int) -> tuple[tuple[int, ...], ...]:
        """Of each share of the experts the places, within this rank's group, of the ranks that hold parts of it."""
        members = mesh.members(rank, self.group_axes(mesh))
        shares: list[list[int]] = [[] for _ in range(mesh.size(self.expert_axes))]
        for place, member in enumerate(members):
            shares[mesh.index(member, self.expert_axes)].append(place)
        return tuple(map(tuple, shares))
