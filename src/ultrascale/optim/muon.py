"""Muon: momentum whose direction is made orthogonal, matrix by matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.mesh.axes import Mesh
from ultrascale.optim.algorithm import Algorithm
from ultrascale.optim.segments import Segment, State, pieces
from ultrascale.optim.whole_matrices import Part, WholeMatrices
from ultrascale.parallel.buckets import Bucket, Span

STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of X ← aX + (bA + cA²)X, A = XXᵀ: five steps bring singular values into about [0.7, 1.2] (Jordan 2024)."""
UPDATE_RMS = 0.2
"""Of an update's elements, as AdamW's are: so learning rate and decay are AdamW's (Liu et al. 2025, §2.2)."""
NOTHING = 1e-7
"""Norm below which a gradient counts as smaller, down to one of zeros, which stays one."""


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix near UVᵀ, where `matrix` is USVᵀ, in its dtype.

    [rows, columns] → the same. A quintic iteration (Jordan 2024, "Muon: an optimizer for hidden layers in neural
    networks"): odd in the singular values, so it needs no decomposition; on the smaller of the two Gram matrices.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = (x / torch.linalg.vector_norm(x).clamp(min=NOTHING)).contiguous()
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x


class Muon(Algorithm):
    """M ← μM + G; W ← W − lr · (0.2 · √max(rows, columns) · orthogonal(G + μM) + decay · W), for each logical matrix.

    Nesterov's momentum and the iteration are Jordan's (2024); scale and decay are those of Liu et al. (2025, "Muon is
    scalable for LLM training", §2.2). Momentum and decay are a matter of elements, and done in the masters' dtype;
    directions travel to where matrices are whole, and are made orthogonal there, in `dtype`.

    spans      of the matrices, on all ranks of the group
    segments   what this rank's shards hold of them
    group      all ranks at this pp coordinate
    """

    def __init__(
        self,
        mesh: Mesh,
        spans: Sequence[tuple[Bucket, Span]],
        segments: Sequence[Segment],
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.matrices = WholeMatrices(mesh, group, spans)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._segment_of = {
            id(span): segment
            for segment in segments
            for bucket, span in spans
            if bucket is segment.bucket and segment.holds(span)
        }
        self._directions: dict[Segment, torch.Tensor] = {}
        self._gathering: Pending | None = None

    def state_names(self, segment: Segment) -> tuple[str, ...]:
        return ("momentum",)

    def update(self, segment: Segment, state: State, step: int, lr: float, coefficient: float) -> None:
        momentum = segment.rule.momentum
        direction = self._directions[segment] = self._like.new_empty(segment.numel)
        for piece in pieces(segment, state, coefficient):
            velocity = piece.state["momentum"].mul_(momentum).add_(piece.gradient)
            direction[piece.start : piece.stop] = (velocity * momentum).add_(piece.gradient)

    def exchange(self) -> None:
        if not self.matrices.idle:
            self._gathering = self.matrices.gather(self._direction, self._like)
            self._directions.clear()

    def finish(self, lr: float) -> None:
        if self._gathering is None:
            return
        wholes = self.matrices.wholes(self._gathering.wait())
        self._gathering = None
        for number, matrix in enumerate(wholes):
            wholes[number] = newton_schulz(matrix)
        for part, values in self.matrices.pieces(self.matrices.scatter(wholes, self._like).wait()):
            rule, bucket = self._segment_of[id(part.task.span)].rule, part.task.bucket
            rate = lr * rule.lr_scale
            master = part.of(bucket.masters, 0)
            # Product and sum apart: where they are one operation, its rounding may depend on how a matrix is cut.
            if rule.weight_decay:
                master.mul_(1.0 - rate * rule.weight_decay)
            master.sub_(values.to(master.dtype) * (rate * UPDATE_RMS * max(part.task.shape) ** 0.5))

    def _direction(self, part: Part) -> torch.Tensor:
        segment = self._segment_of[id(part.task.span)]
        return part.of(self._directions[segment], segment.start)
