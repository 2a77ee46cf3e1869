"""The mesh: every rank's coordinates and every group of ranks, from five sizes and an order. Needs no torch.

A rank is a number in mixed radix. The axes `pp dp ep cp tp` (outermost first; the order is the user's) are
its digits, and an axis may itself be cut into named sub-axes, so that `tp` is also `kv_shard` × `kv_replica`.
The digits that are cut no further are the *leaves*; a group is the set of ranks that differ only in some of
the leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import gcd
from typing import Any

AXES = ("pp", "dp", "ep", "cp", "tp")
"""The five axes in their default order, outermost (slowest varying) first."""


class Mesh:
    """Sizes and order of the five axes, with the rank arithmetic that follows from them.

    order     the five axes, outermost first; the innermost axis has neighbouring ranks
    sizes     size of each axis
    factors   axis → its sub-axes with sizes, outermost first; their product is the size of the axis

    Two meshes are equal when these three are. Raises ValueError when they do not fit together.
    """

    def __init__(
        self,
        order: Sequence[str] = AXES,
        sizes: Mapping[str, int] | None = None,
        factors: Mapping[str, Sequence[tuple[str, int]]] | None = None,
    ) -> None:
        given = dict(sizes or {})
        if sorted(order) != sorted(AXES):
            raise ValueError(f"the order {list(order)} is not a permutation of {list(AXES)}")
        if unknown := (set(given) | set(factors or {})) - set(AXES):
            raise ValueError(f"unknown axes {sorted(unknown)}; the axes are {', '.join(AXES)}")
        self.order = tuple(order)
        self.sizes = {axis: given.get(axis, 1) for axis in self.order}
        self.factors = {axis: tuple((name, size) for name, size in parts) for axis, parts in (factors or {}).items()}
        for axis, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{axis}={size}: an axis has at least one rank")
        self._leaves_of = {axis: self._cut(axis) for axis in self.order}
        leaves = [leaf for axis in self.order for leaf in self._leaves_of[axis]]
        self.leaves = tuple(name for name, _ in leaves)
        if len({*self.leaves, *self.order}) != len(self.leaves) + len(self.factors):
            raise ValueError(f"the names of axes and sub-axes repeat: {self.leaves}")

        # Name → (stride, size), axes and sub-axes alike: the coordinate is rank // stride % size.
        self._digits: dict[str, tuple[int, int]] = {}
        stride = 1
        for axis in reversed(self.order):
            self._digits[axis] = (stride, self.sizes[axis])
            for name, size in reversed(self._leaves_of[axis]):
                self._digits[name] = (stride, size)
                stride *= size
        self.world_size = stride
        names = [n for axis in self.order for n in dict.fromkeys((axis, *self._names(axis)))]
        self._described = [(name, *self._digits[name]) for name in names]
        self._offset_cache: dict[tuple[str, ...], tuple[int, ...]] = {}

    @classmethod
    def of(cls, config: Any) -> Mesh:
        """The mesh of a resolved config (`parallel.dp` filled in).

        `tp` is kv_shard × kv_replica: `kv_shard` divides the KV heads, and where tp is larger than their
        number, `kv_replica` ranks hold the same one. `cp` is cp_ring × cp_ulysses: the ranks that trade tokens for
        heads are neighbours. `dp` is dp_replicate × dp_shard where parallel.dp_shard says so.
        """
        parallel = config.parallel
        if parallel.dp is None:
            raise ValueError("parallel.dp is not resolved: a mesh needs a number for every axis")
        tp, heads = parallel.tp, config.model.num_key_value_heads
        shards = min(tp, heads)
        if tp % shards:
            raise ValueError(f"parallel.tp={tp} neither divides nor is a multiple of model.num_key_value_heads={heads}")
        ulysses = ulysses_size(config)
        factors = {
            "tp": (("kv_shard", shards), ("kv_replica", tp // shards)),
            "cp": (("cp_ring", parallel.cp // ulysses), ("cp_ulysses", ulysses)),
        }
        if parallel.dp_shard is not None and parallel.dp_shard < parallel.dp:
            factors["dp"] = (("dp_replicate", parallel.dp // parallel.dp_shard), ("dp_shard", parallel.dp_shard))
        return cls(
            order=parallel.order,
            sizes={axis: getattr(parallel, axis) for axis in AXES},
            factors=factors,
        )

    # Ranks and coordinates

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a rank on every axis and sub-axis, outermost first."""
        self._check_rank(rank)
        return {name: rank // stride % size for name, stride, size in self._described}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; an axis is given itself, by its sub-axes, or by both if they agree.

        Axes of size 1 may be left out. Raises ValueError on an unknown name, a missing axis or a position out
        of range.
        """
        if unknown := set(coordinates) - set(self._digits):
            raise ValueError(f"unknown axes {sorted(unknown)}; the mesh has {', '.join(self._digits)}")
        rank = 0
        for axis in self.order:
            parts = self._names(axis)
            if axis not in coordinates and all(name in coordinates for name in parts):
                rank += sum(self._place(name, coordinates[name]) for name in parts)
                continue
            if axis not in coordinates and self.sizes[axis] > 1:
                raise ValueError(f"the coordinates {dict(coordinates)} do not say where on {axis}")
            place = self._place(axis, coordinates.get(axis, 0))
            for name in parts:
                stride, size = self._digits[name]
                if coordinates.get(name, place // stride % size) != place // stride % size:
                    raise ValueError(f"{name}={coordinates[name]} contradicts {axis}={coordinates[axis]}")
            rank += place
        return rank

    # Groups

    def expand(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The leaves of these axes and sub-axes, in the order of the mesh."""
        wanted: set[str] = set()
        for name in axes:
            if name not in self._digits:
                raise ValueError(f"unknown axis {name!r}; the mesh has {', '.join(self._digits)}")
            wanted.update(self._names(name) if name in self.sizes else (name,))
        return tuple(leaf for leaf in self.leaves if leaf in wanted)

    def label(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The shortest true name of a group: no axes of size 1, and sub-axes that make up an axis joined."""
        wanted = set(self.expand(axes))
        names: list[str] = []
        for axis in self.order:
            parts = [name for name, size in self._leaves_of[axis] if size > 1]
            held = [name for name in parts if name in wanted]
            names += [axis] if held and held == parts else held
        return tuple(names)

    def size(self, axes: Iterable[str]) -> int:
        """How many ranks a group over these axes has."""
        return len(self._offsets(self.expand(axes)))

    def index(self, rank: int, axes: Iterable[str]) -> int:
        """The position of a rank in its group over these axes: row-major, so ascending with the rank."""
        self._check_rank(rank)
        position = 0
        for leaf in self.expand(axes):
            stride, size = self._digits[leaf]
            position = position * size + rank // stride % size
        return position

    def members(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks of this rank's group over these axes, sorted by `index`."""
        self._check_rank(rank)
        leaves = self.expand(axes)
        base = rank
        for leaf in leaves:
            stride, size = self._digits[leaf]
            base -= rank // stride % size * stride
        return tuple(base + offset for offset in self._offsets(leaves))

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """All groups over these axes, sorted; together they hold every rank once."""
        leaves = self.expand(axes)
        offsets = self._offsets(leaves)
        bases = self._offsets(tuple(leaf for leaf in self.leaves if leaf not in leaves))
        return [tuple(base + offset for offset in offsets) for base in bases]

    # Inside

    def _cut(self, axis: str) -> tuple[tuple[str, int], ...]:
        """The leaves of an axis with their sizes."""
        parts = self.factors.get(axis, ((axis, self.sizes[axis]),))
        total = 1
        for name, size in parts:
            if size < 1:
                raise ValueError(f"{name}={size}: a sub-axis has at least one rank")
            total *= size
        if total != self.sizes[axis]:
            cut = " × ".join(f"{name}={size}" for name, size in parts)
            raise ValueError(f"{axis}={self.sizes[axis]} is not {cut}")
        return parts

    def _names(self, axis: str) -> tuple[str, ...]:
        return tuple(name for name, _ in self._leaves_of[axis])

    def _place(self, name: str, position: int) -> int:
        stride, size = self._digits[name]
        if not 0 <= position < size:
            raise ValueError(f"{name}={position} is outside 0 … {size - 1}")
        return position * stride

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0 … {self.world_size - 1}")

    def _offsets(self, leaves: tuple[str, ...]) -> tuple[int, ...]:
        """Distances of a group's members from its first one; ascending, as leaves have falling strides."""
        if leaves not in self._offset_cache:
            digits = [self._digits[leaf] for leaf in leaves]
            steps = [range(0, stride * size, stride) for stride, size in digits]
            self._offset_cache[leaves] = tuple(sum(step) for step in product(*steps))
        return self._offset_cache[leaves]

    def _key(self) -> tuple[Any, ...]:
        return self.order, tuple(self.sizes.values()), tuple(sorted(self.factors.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Mesh({' '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"


def ulysses_size(config: Any) -> int:
    """Ranks of cp that trade tokens for heads; the groups of them form the ring. A divisor of parallel.cp.

    Where `context.ulysses_size` leaves it open: the largest that divides the query heads of a tp rank too.
    """
    cp: int = config.parallel.cp
    if cp == 1:
        return 1
    context = config.context
    if context.method in ("ring", "allgather"):
        return 1
    if context.method == "ulysses":
        return cp
    heads = config.model.num_attention_heads // config.parallel.tp
    return int(context.ulysses_size or gcd(cp, heads))
