"""Boxes: the rectangular pieces of logical tensors that ranks hold, store and ask for.

A logical tensor has one global shape. A box is a rectangle of it: an offset and a shape of the same number of
dims. Layouts, ZeRO ranges and files all speak in boxes, so that what one layout wrote another can read:
nothing but intersections of boxes. The geometry here needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Dims = tuple[int, ...]

# Each box costs 2**dims corners in the tiling check; no parameter of a transformer has more dims than this.
MAX_DIMS = 6


class CheckpointError(Exception):
    """A checkpoint cannot be written, is not whole, or does not hold what is asked for; the text names all
    that is wrong."""


@dataclass(frozen=True, eq=False)
class Box:
    """A rank's piece of the logical tensor `name`.

    shape   global shape of the logical tensor; () for a scalar
    offset  where the piece begins, one index per dim
    tensor  the values, of the piece's shape; any strides, any device. Saved from, or filled by a load. A
            piece without elements (an uneven split's last rank) is allowed and stores nothing.

    Raises ValueError when the piece does not lie inside the global shape.
    """

    name: str
    shape: Dims
    offset: Dims
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "offset", tuple(self.offset))
        if not inside(self.offset, tuple(self.tensor.shape), self.shape):
            raise ValueError(
                f"box of {self.name}: offset {list(self.offset)} and shape {list(self.tensor.shape)} do not "
                "lie inside the "
                f"global shape {list(self.shape)}"
            )


@dataclass(frozen=True)
class Untiled:
    """The first element that boxes do not hold exactly once, in row-major order, and the boxes that hold
    it."""

    element: Dims
    boxes: tuple[int, ...]


def inside(offset: Dims, shape: Dims, whole: Dims) -> bool:
    """Whether the box lies inside a tensor of shape `whole`."""
    return len(offset) == len(shape) == len(whole) and all(
        o >= 0 and n >= 0 and o + n <= w for o, n, w in zip(offset, shape, whole)
    )


def intersection(offset_a: Dims, shape_a: Dims, offset_b: Dims, shape_b: Dims) -> tuple[Dims, Dims] | None:
    """(offset, shape) of what two boxes of one tensor share; None when they share no element."""
    offset = tuple(map(max, offset_a, offset_b))
    shape = tuple(min(oa + na, ob + nb) - o for o, oa, na, ob, nb in zip(offset, offset_a, shape_a, offset_b, shape_b))
    # A scalar's only box is (), (), and all() of nothing is true: the element is shared.
    return (offset, shape) if all(n > 0 for n in shape) else None


def slices(offset: Dims, shape: Dims, origin: Dims) -> tuple[slice, ...]:
    """The index of the box inside a local tensor whose first element is the global element `origin`."""
    return tuple(slice(o - g, o - g + n) for o, n, g in zip(offset, shape, origin))


def elements(shape: Sequence[int]) -> int:
    """Number of elements of a tensor of this shape; 1 for a scalar."""
    return prod(shape)


def untiled(shape: Dims, boxes: Sequence[tuple[Dims, Dims]]) -> Untiled | None:
    """None when the boxes (offset, shape), each inside `shape`, hold every element exactly once; else the
    first that is not.

    Exact, in time linear in the number of boxes: how often each element is held is a function on the grid,
    and the function is known by its mixed differences, which for one box are +1 and −1 at its 2^n corners.
    The boxes tile the tensor if and only if their corners add up to the corners of the whole. Where they do
    not, the first corner that is left over, in row-major order, has nothing before it, so its residue is the
    number of holders there minus one.
    """
    residue: dict[Dims, int] = {}
    for sign, offset, size in [(-1, (0,) * len(shape), shape), *((1, o, n) for o, n in boxes)]:
        ends = [((o, 1), (o + n, -1)) for o, n in zip(offset, size)]
        for corner in product(*ends):
            point = tuple(c[0] for c in corner)
            residue[point] = residue.get(point, 0) + sign * prod(c[1] for c in corner)
    left_over = [point for point, value in residue.items() if value]
    if not left_over:
        return None
    first = min(left_over)
    holders = tuple(i for i, (o, n) in enumerate(boxes) if all(a <= p < a + b for p, a, b in zip(first, o, n)))
    return Untiled(first, holders)


def pieces(offset: Dims, shape: Dims, limit: int) -> Iterator[tuple[Dims, Dims]]:
    """The box as boxes (offset, shape) of at most `limit` elements each, in row-major order: rows, or parts of one."""
    count = elements(shape)
    if count <= max(1, limit):
        if count:
            yield offset, shape
        return
    row = elements(shape[1:])
    step = max(1, limit // row)
    for first in range(0, shape[0], step):
        rows = min(step, shape[0] - first)
        corner, size = (offset[0] + first, *offset[1:]), (rows, *shape[1:])
        if rows == 1 and row > limit:
            yield from (((corner[0], *o), (1, *s)) for o, s in pieces(corner[1:], size[1:], limit))
        else:
            yield corner, size
