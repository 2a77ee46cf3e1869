"""Which rank holds which stage."""

from __future__ import annotations

Placement = tuple[tuple[int, ...], ...]
"""Stage → the ranks that hold it."""


def linear(ranks: int) -> Placement:
    """Stage r on rank r."""
    return tuple((rank,) for rank in range(ranks))


def loop(ranks: int, virtual_stages: int) -> Placement:
    """Stage c·P + r, the c-th of its rank, on rank r: around the ranks once for each virtual stage."""
    return tuple((stage % ranks,) for stage in range(ranks * virtual_stages))


def v_shape(ranks: int) -> Placement:
    """Two stages a rank, down the ranks and up again: r and 2P − 1 − r on rank r, which so has both ends for r = 0."""
    return tuple((min(stage, 2 * ranks - 1 - stage),) for stage in range(2 * ranks))


def bidirectional(ranks: int) -> Placement:
    """Two copies of each stage: stage s on rank s for one direction, on rank P − 1 − s for the other."""
    return tuple((stage, ranks - 1 - stage) for stage in range(ranks))
