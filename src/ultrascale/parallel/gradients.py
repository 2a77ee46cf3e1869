"""The one place where gradients go, and the one engine that sums them over the mesh.

A stage's stored tensors lie in flat buckets: parameters, gradients and (when the compute dtype is narrower) masters,
each one contiguous buffer whose views the modules use. Layers hand every weight gradient to `accumulate*`; nothing
hangs on autograd's hooks. A bucket's reduction is issued as soon as the last backward of its units has run, as the
action list says, while the rest of backward goes on. Everything is a plain SUM:

1. over the axes that divide the batch, bucket by bucket;
2. over the tensor axes of those members whose uses are divided there too (norms under sequence parallelism, replicated
   KV heads), as one small message of just those members;
3. over the stages that hold copies of a tied parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch
from torch import nn

from ultrascale.comm import collectives
from ultrascale.comm.collectives import DeterministicSum, Pending
from ultrascale.comm.group import Group
from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.init import initialise
from ultrascale.parallel.layout import BATCH_AXES, Layout, Stored, Tie
from ultrascale.parallel.module import Entry, Module, stored_tensors
from ultrascale.precision.policy import Policy

ALIGNMENT = 64
"""Elements to which a stored tensor's start is aligned in its bucket: GEMMs read aligned rows."""

NORM_PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements whose norm is taken at a time, by device type: converted in a core's cache, or in few launches."""


@dataclass(frozen=True, slots=True)
class Span:
    """One logical parameter's elements [start, stop) in a bucket, padding rows included."""

    layout: Layout
    start: int
    stop: int
    local_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A SUM under way, in the dtype in which gradients travel."""

    group: Group
    pending: Pending
    message: torch.Tensor
    target: torch.Tensor
    """Where the sum belongs; the message itself when the dtypes are the same."""

    def advance(self) -> None:
        """Issues the second exchange of a deterministic sum, so that those of several buckets overlap."""
        if isinstance(self.pending, DeterministicSum):
            with self.group.ledger.during("reduce"):
                self.pending.advance()

    def finish(self) -> None:
        """Waits, and puts the sum in its place."""
        with self.group.ledger.during("reduce"):
            self.pending.wait()
        if self.message is not self.target:
            self.target.copy_(self.message)


@dataclass(eq=False)
class Bucket:
    """Stored tensors that are reduced together: the same batch axes, the same tie, neighbours in order of use."""

    stage: int
    axes: tuple[str, ...]
    """Leaf axes of its reduction."""
    tie: str | None
    entries: list[Entry]
    units: tuple[str, ...]
    spans: list[Span] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Where each entry's tensor begins."""
    numel: int = 0
    parameters: torch.Tensor = field(init=False)
    masters: torch.Tensor = field(init=False)
    gradients: torch.Tensor = field(init=False)
    reduction: Reduction | None = None
    missing: set[str] = field(default_factory=set)
    """Units whose last backward of this step is still ahead."""


class Gradients:
    """Buckets of all stages on this rank: memory of parameters and gradients, accumulation, reduction.

    stages       stage → its units in order of use, (name, module)
    group_of     communication group of some leaf axes, seen from this rank (size 1 when they have size 1)
    tie_groups   tie → the group of this rank's copies of it over stages (absent: no other copy)
    """

    def __init__(
        self,
        stages: Mapping[int, list[tuple[str, nn.Module]]],
        mesh: Mesh,
        rank: int,
        policy: Policy,
        group_of: Callable[[tuple[str, ...]], Group],
        tie_groups: Mapping[str, Group],
        bucket_bytes: int,
        deterministic: bool,
    ) -> None:
        self.mesh, self.rank, self.policy = mesh, rank, policy
        self.group_of, self.tie_groups = group_of, dict(tie_groups)
        self.deterministic = deterministic
        self._roots = [module for units in stages.values() for _, module in units]
        self.buckets: list[Bucket] = []
        for stage, units in stages.items():
            self.buckets += _make_buckets(stage, list(stored_tensors(units)), mesh, policy, bucket_bytes)
        self._view: dict[int, tuple[torch.Tensor, Bucket]] = {}
        self._touched: set[int] = set()
        self._last: dict[int, int] = {}
        self._issued: list[Reduction] = []
        """Of this step, in the order in which all replicas issue them."""

    # ---- memory ---------------------------------------------------------------------------------------------------

    def materialise(self, device: torch.device, seed: int) -> None:
        """Gives every parameter memory on `device`, as a view of its bucket, and its initial values."""
        policy = self.policy
        made: dict[int, nn.Parameter] = {}
        for bucket in self.buckets:
            bucket.parameters = torch.zeros(bucket.numel, dtype=policy.compute, device=device)
            bucket.gradients = torch.zeros(bucket.numel, dtype=policy.accumulate, device=device)
            same = policy.master == policy.compute
            bucket.masters = (
                bucket.parameters if same else torch.zeros(bucket.numel, dtype=policy.master, device=device)
            )
            for span in bucket.spans:
                offset, _ = span.layout.box(self.mesh, self.rank)
                initialise(self.valid(bucket.masters, span), span.layout, offset, seed)
            if not same:
                bucket.parameters.copy_(bucket.masters)
            for entry, start in zip(bucket.entries, bucket.starts, strict=True):
                shape, stop = entry.parameter.shape, start + entry.parameter.numel()
                parameter = nn.Parameter(bucket.parameters[start:stop].view(shape))
                made[id(entry.parameter)] = parameter
                self._view[id(parameter)] = (bucket.gradients[start:stop].view(shape), bucket)
        self._rebind(made)

    def _rebind(self, made: Mapping[int, nn.Parameter]) -> None:
        """Puts the real parameters where the meta ones were, in every module that uses them (ties: in several)."""
        for root in self._roots:
            for module in root.modules():
                if isinstance(module, Module):
                    module.replace({name: made[id(p)] for name, p in module.named_parameters(recurse=False)})
        for bucket in self.buckets:
            bucket.entries = [replace(entry, parameter=made[id(entry.parameter)]) for entry in bucket.entries]

    def valid(self, flat: torch.Tensor, span: Span) -> torch.Tensor:
        """The span's elements in a bucket-sized buffer as this rank's box of the logical tensor: no padding, a view."""
        _, shape = span.layout.box(self.mesh, self.rank)
        view = flat[span.start : span.stop].view(span.local_shape)
        for dim, size in enumerate(shape):
            view = view.narrow(dim, 0, size)
        return view

    # ---- accumulation (the sink of parallel/passes.py) ------------------------------------------------------------

    def begin_step(self, last_backward: Mapping[int, int]) -> None:
        """Zeroes the gradients; `last_backward` says for each stage the micro-batch whose backward comes last."""
        self._last = dict(last_backward)
        for bucket in self.buckets:
            bucket.gradients.zero_()
            bucket.missing = set(bucket.units)
            assert bucket.reduction is None, "a reduction of the last step was never awaited"

    def _target(self, parameter: torch.Tensor) -> torch.Tensor:
        try:
            view, bucket = self._view[id(parameter)]
        except KeyError:
            raise KeyError("a gradient came for a tensor that no bucket holds") from None
        assert bucket.reduction is None, f"a gradient of {bucket.units} came after its reduction was issued"
        self._touched.add(id(parameter))
        return view

    def accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor, stage: int, micro_batch: int) -> None:
        self._target(parameter).add_(gradient)

    def accumulate_product(
        self, parameter: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, stage: int, micro_batch: int
    ) -> None:
        target = self._target(parameter)[: dy.shape[1]]
        if dy.dtype == target.dtype:
            target.addmm_(dy.t(), x)
        else:
            target.add_(dy.t().mm(x))

    def accumulate_rows(
        self,
        parameter: torch.Tensor,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        stage: int,
        micro_batch: int,
    ) -> None:
        target = self._target(parameter)
        target.index_add_(0, rows, gradient.to(target.dtype))

    # ---- reduction ------------------------------------------------------------------------------------------------

    def unit_done(self, unit: str, stage: int, micro_batch: int) -> None:
        """A unit's weight gradients of one micro-batch are there; the last one of the step may free its bucket."""
        if self._last.get(stage) != micro_batch:
            return
        for bucket in self.buckets:
            if bucket.stage == stage and unit in bucket.missing:
                bucket.missing.discard(unit)
                if not bucket.missing:
                    self._issue(bucket)

    def reduce(self, stage: int) -> None:
        """The REDUCE action: issues what is left of the stage (its first unit has no input gradient to end it)."""
        for bucket in self.buckets:
            if bucket.stage == stage and bucket.missing:
                bucket.missing.clear()
                self._issue(bucket)

    def _issue(self, bucket: Bucket) -> None:
        """Issues a bucket's reduction, and the second half of those that have had time to arrive: pieces are freed."""
        for earlier in self._issued[:-1]:
            earlier.advance()
        bucket.reduction = self._sum(bucket.gradients, self.group_of(bucket.axes))
        self._issued.append(bucket.reduction)

    def _sum(self, flat: torch.Tensor, group: Group) -> Reduction:
        """SUM of a flat buffer over the group, issued. Where nothing travels, nothing is rounded."""
        if group.size == 1:
            return Reduction(group, Pending(flat), flat, flat)
        message = flat.to(self.policy.reduce)
        operation = collectives.deterministic_all_reduce if self.deterministic else collectives.all_reduce
        with group.ledger.during("reduce"):
            pending = operation(message, group)
        return Reduction(group, pending, message, flat)

    def finish(self) -> None:
        """Waits for all buckets, then sums over tensor axes and ties. Afterwards gradients are whole."""
        assert len(self._issued) == len(self.buckets), "a stage was never reduced: the plan has no REDUCE for it"
        for reduction in self._issued:
            reduction.advance()
        for reduction in self._issued:
            reduction.finish()
        self._issued = []
        for bucket in self.buckets:
            bucket.reduction = None
        for axes, parts in self._tensor_sums().items():
            self._sum_parts(parts, self.group_of(axes))
        for bucket in self.buckets:
            if bucket.tie in self.tie_groups:
                self._sum(bucket.gradients, self.tie_groups[bucket.tie]).finish()

    def _tensor_sums(self) -> dict[tuple[str, ...], list[torch.Tensor]]:
        """Axes beyond the batch's → the members whose gradients arrive in parts over them too."""
        sums: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for bucket in self.buckets:
            for span in bucket.spans:
                axes = tuple(a for a in span.layout.gradient_axes(self.mesh) if a not in bucket.axes)
                if self.mesh.size(axes) > 1:
                    sums.setdefault(axes, []).append(bucket.gradients[span.start : span.stop])
        return sums

    def _sum_parts(self, parts: list[torch.Tensor], group: Group) -> None:
        message = torch.cat(parts)
        self._sum(message, group).finish()
        for part, total in zip(parts, message.split([part.numel() for part in parts]), strict=True):
            part.copy_(total)

    def untouched(self) -> list[str]:
        """Logical parameters that have had no gradient since the start: a model that lost one must not train on.

        Of a padded vocabulary a rank may hold nothing but padding; that part expects none.
        """
        return [
            layout.name
            for bucket in self.buckets
            for entry in bucket.entries
            if id(entry.parameter) not in self._touched
            for layout in entry.stored.members
            if prod(layout.box(self.mesh, self.rank)[1])
        ]

    def counts(self, bucket: Bucket, span: Span) -> bool:
        """Whether this rank is the one that counts the span in the norm and saves it: one of all its copies."""
        if not span.layout.is_owner(self.mesh, self.rank):
            return False
        group = self.tie_groups.get(bucket.tie) if bucket.tie else None
        return group is None or group.index == 0

    def ties(self) -> list[Tie]:
        """Ties of the parameters on this rank."""
        spans = (span for bucket in self.buckets for span in bucket.spans)
        return list(dict.fromkeys(span.layout.tie for span in spans if span.layout.tie))

    @torch.no_grad()
    def square_sum(self) -> torch.Tensor:
        """This rank's share of the squared global norm, float64 scalar; over the world each element is in once."""
        device = self.buckets[0].gradients.device if self.buckets else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self.buckets:
            for start, stop in runs(bucket.spans, partial(self.counts, bucket)):
                # In float64, so that the norm does not depend on how elements are grouped; piece by piece, since each
                # piece is converted whole.
                for piece in bucket.gradients[start:stop].split(NORM_PIECE[device.type]):
                    total += torch.linalg.vector_norm(piece, dtype=torch.float64).square()
        return total

    def publish(self) -> None:
        """After an optimizer step: rebuilds the compute copies from the masters."""
        for bucket in self.buckets:
            if bucket.masters is not bucket.parameters:
                bucket.parameters.copy_(bucket.masters)


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


def _make_buckets(stage: int, entries: list[Entry], mesh: Mesh, policy: Policy, bucket_bytes: int) -> list[Bucket]:
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
            units = tuple(dict.fromkeys(entry.unit for entry in members))
            bucket = Bucket(stage, axes, tie, members, units)
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
