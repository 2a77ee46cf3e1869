"""What is true of a parameter, said once, as data; everything else about it is derived from here.

A *logical* parameter is what a paper, a checkpoint or Hugging Face calls a parameter: `q_proj.weight`, with one
global shape. A *stored* tensor is what lies in memory: the rows of one or several logical parameters, one after
another, each cut as its layout says (a fused QKV is one GEMM, while q, k and v stay apart).

From layouts, and only from them, come: initial values (`init.py`), the groups that sum a gradient, who counts an
element in the norm, and the boxes of a checkpoint. This file needs no torch, so that plans can be made without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from ultrascale.mesh.axes import Mesh


class Use(Enum):
    """How a parameter's uses are divided over the tensor axis. Over dp, ep and cp they always are: other tokens."""

    WHOLE = "whole"  # every tp rank applies it to the same tokens and computes the same
    TOKENS = "tokens"  # sequence-parallel region: every tp rank applies it to its own tokens
    FEATURES = "features"  # every tp rank applies it to, or computes with it, its own heads or features


class Kind(Enum):
    """What a parameter is to an optimizer."""

    MATRIX = "matrix"  # a hidden layer's [out, in], or a stack of them [experts, out, in]
    NORM = "norm"  # a vector: a norm's weight, a bias
    EMBEDDING = "embedding"  # [vocabulary, hidden], looked up; a tied head too
    HEAD = "head"  # [vocabulary, hidden], multiplied with


BATCH_AXES = ("dp", "ep", "cp")
"""Axes over which the tokens of a step are divided."""


@dataclass(frozen=True, slots=True)
class Normal:
    """Initial values drawn from N(0, std²)."""

    std: float


@dataclass(frozen=True, slots=True)
class Constant:
    """One initial value everywhere."""

    value: float


Initializer = Normal | Constant


@dataclass(frozen=True, slots=True)
class Tie:
    """One logical parameter that several modules use, perhaps on several pipeline stages."""

    group: str
    names: tuple[str, ...]
    """What its users call it; the first is the layout's own name, under which it is stored once."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about one logical parameter. No field has a default: each is a decision of the model's author."""

    name: str
    """Logical name, the same on every rank, under every layout: `layers.7.attention.q_proj.weight`."""
    shape: tuple[int, ...]
    """Global shape, without padding."""
    split: Mapping[int, tuple[str, ...]]
    """Tensor dim → axes (or sub-axes) that cut it into equal pieces; a last piece may be short."""
    used_in: Use
    tie: Tie | None
    init: Initializer
    decay: bool
    """Whether weight decay applies."""
    lr_scale: float
    """Factor on the learning rate (muP and the like)."""
    pad_to: Mapping[int, int]
    """Tensor dim → multiple up to which memory is padded with zeros. Independent of the split; never stored."""
    kind: Kind
    """Which of its groups it belongs to for the optimizer."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def piece(self, dim: int, mesh: Mesh) -> int:
        """Size of `dim` in each rank's memory, padding included."""
        multiple = self.pad_to.get(dim, 1)
        padded = -(-self.shape[dim] // multiple) * multiple
        return -(-padded // mesh.size(self.split.get(dim, ())))

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of a rank's piece in memory: the same on every rank."""
        return tuple(self.piece(dim, mesh) for dim in range(len(self.shape)))

    def box(self, mesh: Mesh, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of what `rank` holds of the global tensor; padding is not part of it, so it may be empty."""
        offset, shape = [], []
        for dim, size in enumerate(self.shape):
            piece = self.piece(dim, mesh)
            axes = self.split.get(dim, ())
            start = min(size, piece * mesh.index(rank, axes)) if axes else 0
            offset.append(start)
            shape.append(min(size, start + piece) - start)
        return tuple(offset), tuple(shape)

    def split_axes(self, mesh: Mesh) -> frozenset[str]:
        """Leaf axes over which the tensor is cut."""
        return frozenset(leaf for axes in self.split.values() for leaf in mesh.expand(axes))

    def gradient_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Leaf axes over which its gradient arrives in parts: where its uses are divided, minus where it is cut."""
        divided = BATCH_AXES if self.used_in is Use.WHOLE else (*BATCH_AXES, "tp")
        cut = self.split_axes(mesh)
        return tuple(leaf for leaf in mesh.expand(divided) if leaf not in cut)

    def replica_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Leaf axes over which equal copies are held: all but the pipeline's and those it is cut over."""
        cut = self.split_axes(mesh)
        return tuple(leaf for leaf in mesh.leaves if leaf != "pp" and leaf not in cut)

    def is_owner(self, mesh: Mesh, rank: int, shard_axes: tuple[str, ...] = ()) -> bool:
        """Whether `rank` is the one of its replicas that counts and saves the piece (copies over stages apart).

        shard_axes   leaves over which replicas share the piece out (ZeRO): each owns its own part of it
        """
        coordinates = mesh.coordinates(rank)
        return all(coordinates[leaf] == 0 for leaf in self.replica_axes(mesh) if leaf not in shard_axes)


@dataclass(frozen=True, slots=True)
class Member:
    """A logical parameter's place in a stored tensor: rows [row, row + rows), padding included."""

    layout: Layout
    row: int
    rows: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in memory: logical parameters that lie one after another along dim 0."""

    members: tuple[Layout, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("a stored tensor needs at least one layout")
        if len(self.members) > 1 and any(layout.tie for layout in self.members):
            raise ValueError(f"{self.members[0].name}: a tied parameter is stored alone")

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape in each rank's memory."""
        shapes = [layout.local_shape(mesh) for layout in self.members]
        if len({shape[1:] for shape in shapes}) != 1:
            names = ", ".join(layout.name for layout in self.members)
            raise ValueError(f"{names} cannot be stored as one tensor: their local rows differ in shape {shapes}")
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def places(self, mesh: Mesh) -> tuple[Member, ...]:
        """Where each member lies."""
        row, places = 0, []
        for layout in self.members:
            rows = layout.local_shape(mesh)[0]
            places.append(Member(layout, row, rows))
            row += rows
        return tuple(places)
