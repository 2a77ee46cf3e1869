"""Flat buckets: where every stored tensor of this rank lies in memory, and what is reduced together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch

from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.layout import BATCH_AXES, Layout, Stored
from ultrascale.parallel.module import Entry
from ultrascale.parallel.shards import Dims, Sharding, boxes_of_range
from ultrascale.precision.policy import Policy

ALIGNMENT = 64
"""Elements to which a stored tensor's start is aligned in its bucket: GEMMs read aligned rows."""


@dataclass(frozen=True, slots=True)
class Span:
    """One logical parameter's elements [start, stop) in a bucket, padding rows included."""

    layout: Layout
    start: int
    stop: int
    local_shape: tuple[int, ...]


Use = tuple[int, str]
"""(stage, unit)"""


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a logical tensor that some rank holds, and where in that rank's shard of a bucket it lies."""

    offset: Dims
    """In the logical tensor."""
    shape: Dims
    """Without padding."""
    start: int
    """Of the shard's element that holds the box's first."""
    memory: Dims
    """Shape in memory, row-major from `start`; `shape` is its first corner."""


@dataclass(eq=False)
class Bucket:
    """Stored tensors that are reduced, and gathered, together: the same batch axes, the same tie, whole units.

    Of its `numel` elements this rank's shard is [lo, hi), the whole where nothing is shared out (ZeRO stage 0).
    """

    stage: int
    axes: tuple[str, ...]
    """Leaf axes of its reduction: shard_axes, and those over which shards have copies."""
    shard_axes: tuple[str, ...]
    tie: str | None
    entries: list[Entry]
    uses: tuple[Use, ...]
    """Whose forward reads it and whose backward adds to it."""
    spans: list[Span] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Where each entry's tensor begins."""
    numel: int = 0
    lo: int = 0
    hi: int = 0
    weights: torch.Tensor | None = None
    """[numel] in the compute dtype, what modules read; None while it is not gathered."""
    piece: torch.Tensor = field(init=False)
    """[hi − lo] in the compute dtype: this rank's part of the weights."""
    masters: torch.Tensor = field(init=False)
    """[hi − lo] in the master dtype; `piece` itself when the dtypes are the same."""
    accumulator: torch.Tensor | None = None
    """[numel] gradients of this rank's own micro-batches; None where they are passed on as they come (stages 2, 3)."""
    gradients: torch.Tensor = field(init=False)
    """[hi − lo] in the accumulate dtype: what the optimizer reads, once all reductions have ended."""

    def shard(self, span: Span) -> tuple[int, int]:
        """(start, stop) within this rank's shard of the span's elements that are in it; empty when none are."""
        start, stop = max(span.start, self.lo), min(span.stop, self.hi)
        return start - self.lo, max(start, stop) - self.lo

    def held(self, span: Span, mesh: Mesh, rank: int) -> Iterator[Held]:
        """The boxes of a span that `rank`, any of those with this bucket, has in its shard, in order."""
        origin, valid = span.layout.box(mesh, rank)
        lo = (self.hi - self.lo) * mesh.index(rank, self.shard_axes)
        start, stop = max(span.start, lo), min(span.stop, lo + self.hi - self.lo)
        position = start - lo
        for corner, memory in boxes_of_range(span.local_shape, start - span.start, stop - span.start):
            shape = tuple(max(0, min(n, v - c)) for c, n, v in zip(corner, memory, valid, strict=True))
            if prod(shape):
                yield Held(tuple(a + b for a, b in zip(origin, corner, strict=True)), shape, position, memory)
            position += prod(memory)


def runs(spans: Iterable[Span], chosen: Callable[[Span], bool]) -> list[tuple[int, int]]:
    """(start, stop) of the chosen spans of a bucket, neighbours merged.

    The alignment gap between two neighbours is part of a run: it holds zeros for ever. A span that is not chosen is
    part of none, however small.
    """
    merged: list[tuple[int, int]] = []
    follows = False
    for span in spans:
        if chosen(span):
            start = merged.pop()[0] if follows else span.start
            merged.append((start, span.stop))
        follows = chosen(span)
    return merged


_Key = tuple[tuple[str, ...], str | None]
"""(batch axes of the reduction, tie): tensors with one key may share a bucket."""


def _bucket_key(stored: Stored, mesh: Mesh) -> _Key:
    batch = set(mesh.expand(BATCH_AXES))
    keys = {tuple(a for a in layout.gradient_axes(mesh) if a in batch) for layout in stored.members}
    if len(keys) != 1:
        raise ValueError(f"members of one stored tensor are reduced over different batch axes: {sorted(keys)}")
    tie = stored.members[0].tie
    return keys.pop(), tie.group if tie else None


def make_buckets(
    stage: int, entries: list[Entry], mesh: Mesh, rank: int, policy: Policy, sharding: Sharding, bucket_bytes: int
) -> list[Bucket]:
    """Buckets in reverse order of use, so that the first is full when most of backward is still ahead.

    From ZeRO stage 2 on a bucket is one unit: what is passed on, or gathered, at a time.
    """
    if sharding.stage >= 2:
        bucket_bytes = 0
    groups: dict[_Key, list[list[Entry]]] = {}
    sizes: dict[_Key, int] = {}
    # A unit stays whole: its tensors become ready together, and later stages of ZeRO gather it as one.
    units: dict[tuple[_Key, str], list[Entry]] = {}
    for entry in reversed(entries):
        units.setdefault((_bucket_key(entry.stored, mesh), entry.units[0]), []).append(entry)
    for (key, _), members in units.items():
        size = sum(entry.parameter.numel() for entry in members) * policy.accumulate.itemsize
        buckets = groups.setdefault(key, [])
        if not buckets or sizes[key] + size > bucket_bytes:
            buckets.append([])
            sizes[key] = 0
        buckets[-1] += members
        sizes[key] += size
    made = []
    for (axes, tie), buckets in groups.items():
        for members in buckets:
            uses = tuple(dict.fromkeys((stage, unit) for entry in members for unit in entry.units))
            bucket = Bucket(stage, axes, sharding.of(axes), tie, members, uses)
            _lay_out(bucket, mesh)
            _cut(bucket, mesh, rank)
            made.append(bucket)
    return made


def _lay_out(bucket: Bucket, mesh: Mesh) -> None:
    """Gives each stored tensor its place; tensors of one decay and learning-rate class lie next to each other."""
    bucket.entries.sort(key=lambda e: (not e.stored.members[0].decay, e.stored.members[0].lr_scale))
    offset = 0
    for entry in bucket.entries:
        bucket.starts.append(offset)
        row_size = entry.parameter.numel() // max(1, entry.parameter.shape[0])
        for member in entry.stored.places(mesh):
            start = offset + member.row * row_size
            stop = start + member.rows * row_size
            bucket.spans.append(Span(member.layout, start, stop, member.layout.local_shape(mesh)))
        offset += -(-entry.parameter.numel() // ALIGNMENT) * ALIGNMENT
    bucket.numel = offset


def _cut(bucket: Bucket, mesh: Mesh, rank: int) -> None:
    """Equal shards, in the order of the shard group; the end of the last ones may be empty space."""
    shards = mesh.size(bucket.shard_axes)
    size = -(-bucket.numel // (shards * ALIGNMENT)) * ALIGNMENT
    bucket.numel = shards * size
    bucket.lo = size * mesh.index(rank, bucket.shard_axes)
    bucket.hi = bucket.lo + size
