"""What a rank holds and sends under each ZeRO stage, in closed form (Rajbhandari et al. 2020). Needs no torch.

Tests count both in real steps and compare them with this; the table in docs/zero.md is made from it. Padding of buckets
is left out: below 1%.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED_FROM = {"weights": 3, "gradients": 2, "masters": 1, "moments": 1}
"""What a parameter costs → the stage from which on replicas share it out."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes that each copy of a parameter takes."""

    compute: int
    """Of the weight that forward and backward read."""
    wide: int
    """Of the master and of the gradient as it is added up; a weight that is as wide is its own master."""
    moments: int
    """Of all moments together: twice `wide` for AdamW, unless optimizer.state_dtype says otherwise."""

    def of(self, item: str) -> int:
        """Bytes per parameter of one of SHARED_FROM."""
        masters = 0 if self.compute == self.wide else self.wide
        return {"weights": self.compute, "gradients": self.wide, "masters": masters, "moments": self.moments}[item]


def held_bytes(stage: int, item: str, parameters: float, ranks: int, widths: Widths) -> float:
    """Bytes at rest of one of SHARED_FROM, on a rank that shares `parameters` with `ranks` in all.

    At stages 2 and 3 one unit's gradients come on top while they are made and sent, at stage 3 prefetch + 1 units'
    weights.
    """
    return parameters * widths.of(item) / (ranks if stage >= SHARED_FROM[item] else 1)


def gathers(stage: int, micro_batches: int, kept: bool = False) -> int:
    """How often all weights are gathered in a step; `kept`: from a first forward to a last backward."""
    if stage == 3 and not kept:
        return 2 * micro_batches  # before forward, and again before backward
    return min(stage, 1)


def reductions(stage: int, micro_batches: int) -> int:
    """How often all gradients travel in a step; an all-reduce is two ways, a reduce-scatter one."""
    return micro_batches if stage >= 2 else 2 - stage


def sent_bytes(stage: int, weights: int, gradients: int, micro_batches: int, ranks: int, kept: bool = False) -> int:
    """Bytes that a rank sends in a step to those that it shares with.

    weights     of what they share, in the compute dtype
    gradients   in the dtype in which they travel
    """
    total = gathers(stage, micro_batches, kept) * weights + reductions(stage, micro_batches) * gradients
    return total * (ranks - 1) // ranks


def copies_bytes(gradients: int, shards: int, copies: int) -> int:
    """Bytes that a rank sends in a step to those that hold copies of its shard (HSDP), whatever the micro-batches."""
    return 2 * (gradients // shards) * (copies - 1) // copies
