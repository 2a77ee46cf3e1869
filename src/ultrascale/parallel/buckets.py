"""Flat buckets: where every stored tensor of this rank lies in memory, and what is reduced together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.layout import BATCH_AXES, Layout, Stored
from ultrascale.parallel.module import Entry
from ultrascale.parallel.reduction import Reduction
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


@dataclass(eq=False)
class Bucket:
    """Stored tensors that are reduced together: the same batch axes, the same tie, neighbours in order of use."""

    stage: int
    axes: tuple[str, ...]
    """Leaf axes of its reduction."""
    tie: str | None
    entries: list[Entry]
    uses: tuple[tuple[int, str], ...]
    """(stage, unit) whose backward adds to it."""
    spans: list[Span] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Where each entry's tensor begins."""
    numel: int = 0
    parameters: torch.Tensor = field(init=False)
    masters: torch.Tensor = field(init=False)
    gradients: torch.Tensor = field(init=False)
    reduction: Reduction | None = None
    missing: set[tuple[int, str]] = field(default_factory=set)
    """Uses whose last backward of this step is still ahead."""


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


def _bucket_key(stored: Stored, mesh: Mesh) -> tuple[tuple[str, ...], str | None]:
    """(batch axes of the reduction, tie): tensors with one key may share a bucket."""
    batch = set(mesh.expand(BATCH_AXES))
    keys = {tuple(a for a in layout.gradient_axes(mesh) if a in batch) for layout in stored.members}
    if len(keys) != 1:
        raise ValueError(f"members of one stored tensor are reduced over different batch axes: {sorted(keys)}")
    tie = stored.members[0].tie
    return keys.pop(), tie.group if tie else None


def make_buckets(stage: int, entries: list[Entry], mesh: Mesh, policy: Policy, bucket_bytes: int) -> list[Bucket]:
    """Buckets in reverse order of use, so that the first is full when most of backward is still ahead."""
    groups: dict[tuple[tuple[str, ...], str | None], list[list[Entry]]] = {}
    sizes: dict[tuple[tuple[str, ...], str | None], int] = {}
    for entry in reversed(entries):
        key = _bucket_key(entry.stored, mesh)
        size = entry.parameter.numel() * policy.accumulate.itemsize
        buckets = groups.setdefault(key, [])
        # A unit stays whole: its tensors become ready together, and later stages of ZeRO gather it as one.
        same_unit = bool(buckets) and buckets[-1][-1].unit == entry.unit
        if not buckets or (sizes[key] + size > bucket_bytes and not same_unit):
            buckets.append([])
            sizes[key] = 0
        buckets[-1].append(entry)
        sizes[key] += size
    made = []
    for (axes, tie), buckets in groups.items():
        for members in buckets:
            uses = tuple(dict.fromkeys((stage, entry.unit) for entry in members))
            bucket = Bucket(stage, axes, tie, members, uses)
            _lay_out(bucket, mesh)
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
