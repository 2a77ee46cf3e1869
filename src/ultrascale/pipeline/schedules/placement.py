"""Which rank holds which stage."""

from __future__ import annotations

Placement = tuple[tuple[int, ...], ...]
"""Stage → the ranks that hold it."""


def linear(stages: int) -> Placement:
    """Stage r on rank r."""
    return tuple((rank,) for rank in range(stages))
