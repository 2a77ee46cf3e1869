"""How a flat piece of a tensor lies in it: the geometry of ZeRO's cuts. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ultrascale.mesh.axes import Mesh

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Sharding:
    """What replicas of a parameter share out, and over which of the axes that replicate it.

    stage   0 nothing, 1 optimizer state and masters, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020)
    axes    leaves of the mesh; a parameter is cut over those of them that replicate it
    """

    stage: int
    axes: tuple[str, ...]

    def of(self, replicating: tuple[str, ...]) -> tuple[str, ...]:
        """The axes that cut a parameter which is replicated over these batch axes."""
        return tuple(axis for axis in replicating if axis in self.axes) if self.stage else ()

    @staticmethod
    def on(mesh: Mesh, stage: int, batch_axes: tuple[str, ...]) -> Sharding:
        """Over all batch axes but dp's replicating part: shard × replicate, where `dp` is so cut (HSDP)."""
        return Sharding(stage, tuple(leaf for leaf in mesh.expand(batch_axes) if leaf != "dp_replicate"))


def boxes_of_range(shape: Dims, start: int, stop: int) -> Iterator[tuple[Dims, Dims]]:
    """The elements [start, stop) of a row-major tensor as boxes (offset, shape), in order: at most 2n − 1 of n dims."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and len(shape) > 1 and stop - start < row:
        yield from _in_row(shape, first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from _in_row(shape, first, start % row, row)
        first += 1
    whole = stop // row
    if whole > first:
        yield (first, *(0,) * (len(shape) - 1)), (whole - first, *shape[1:])
    if stop % row:
        yield from _in_row(shape, whole, 0, stop % row)


def _in_row(shape: Dims, row: int, start: int, stop: int) -> Iterator[tuple[Dims, Dims]]:
    for offset, size in boxes_of_range(shape[1:], start, stop):
        yield (row, *offset), (1, *size)
