"""Flat memory cut by rule: neighbouring elements of a bucket's shard that are updated alike, with their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from ultrascale.optim.groups import Rule
from ultrascale.parallel.buckets import ALIGNMENT, Bucket, Span, runs
from ultrascale.parallel.layout import Layout

State = dict[str, torch.Tensor]
"""Name → [stop − start] of a segment."""

PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements that are updated at a time, by device type: what an update needs beside its operands stays this small, and
on a CPU in a core's cache. Multiples of ALIGNMENT."""


@dataclass(eq=False)
class Segment:
    """Elements [start, stop) of a bucket's shard with one rule."""

    bucket: Bucket
    start: int
    stop: int
    rule: Rule
    state: State = field(default_factory=dict)
    """As it is held: in the state's dtype, on the device or on the host."""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def holds(self, span: Span) -> bool:
        """Whether a span's elements in this shard are here; all of them are, or none."""
        start, stop = self.bucket.shard(span)
        return start < stop and self.start <= start and stop <= self.stop


def segments(buckets: Iterable[Bucket], rule_of: Callable[[Layout], Rule]) -> Iterator[Segment]:
    """Every rule's segments of every bucket.

    A segment takes the empty space behind its last tensor too, so that it ends at a multiple of ALIGNMENT wherever
    another tensor does not follow at once: kernels may round the last few elements of a piece otherwise, and which
    they are must not depend on how tensors are put into buckets.
    """
    for bucket in buckets:
        rules = {span.layout.name: rule_of(span.layout) for span in bucket.spans}
        starts = [*(span.start for span in bucket.spans), bucket.numel]
        for rule in dict.fromkeys(rules.values()):
            for start, stop in runs(bucket.spans, partial(_has_rule, rules, rule)):
                stop = min(_aligned(stop), min(s for s in starts if s >= stop))
                start, stop = max(start, bucket.lo), min(stop, bucket.hi)
                if start < stop:
                    yield Segment(bucket, start - bucket.lo, stop - bucket.lo, rule)


def _has_rule(rules: Mapping[str, Rule], rule: Rule, span: Span) -> bool:
    return rules[span.layout.name] == rule


@dataclass(frozen=True, slots=True)
class Piece:
    """What is updated at a time, in the dtype of the masters."""

    start: int
    stop: int
    """Within the segment."""
    master: torch.Tensor
    gradient: torch.Tensor
    """Scaled; not to be written to."""
    state: State


def pieces(segment: Segment, state: State, coefficient: float) -> Iterator[Piece]:
    """The segment piece by piece; state that is held in another dtype is rounded to it after each.

    state         of the segment, on the device
    coefficient   factor on the gradient (clipping)
    Cuts are at multiples of ALIGNMENT, as those between shards are: shards change no bit.
    """
    bucket = segment.bucket
    masters, size = bucket.masters, PIECE[bucket.masters.device.type]
    start = segment.start
    while start < segment.stop:
        stop = min(segment.stop, _aligned(start) if start % ALIGNMENT else start + size)
        gradient = bucket.gradients[start:stop].to(masters.dtype)
        if coefficient != 1.0:
            gradient = gradient * coefficient
        first, last = start - segment.start, stop - segment.start
        held = {name: tensor[first:last] for name, tensor in state.items()}
        wide = {name: tensor.to(masters.dtype) for name, tensor in held.items()}
        yield Piece(first, last, masters[start:stop], gradient, wide)
        for name, tensor in held.items():
            if wide[name] is not tensor:
                tensor.copy_(wide[name])
        start = stop


def _aligned(start: int) -> int:
    return -(-start // ALIGNMENT) * ALIGNMENT
