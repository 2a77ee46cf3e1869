"""The one place where gradients go, and the one engine that sums them over the mesh.

A stage's stored tensors lie in flat buckets: parameters, gradients and (when the compute dtype is narrower) masters,
each one contiguous buffer whose views the modules use. Layers hand every weight gradient to `accumulate*`; nothing
hangs on autograd's hooks. A bucket's reduction is issued as soon as the last backward of its units has run, as the
action list says, while the rest of backward goes on. Everything is a plain SUM:

1. over the axes that divide the batch, bucket by bucket;
2. over the tensor axes of those members whose uses are divided there too (norms under sequence parallelism, replicated
   KV heads), as one small message of just those members;
3. over the pp coordinates that hold copies: of a tied parameter, or of a whole stage (two-way schedules).

Where a backward is split, weight gradients that a layer hands to `defer` wait in a queue of their (stage, micro-batch)
until the BW action runs it; a unit is done when the queue comes to the end of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import nn

from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.buckets import Bucket, Span, make_buckets, runs
from ultrascale.parallel.init import initialise
from ultrascale.parallel.layout import Tie
from ultrascale.parallel.module import Entry, Module, stored_tensors
from ultrascale.parallel.passes import WeightGradient
from ultrascale.parallel.reduction import Reduction
from ultrascale.precision.policy import Policy

NORM_PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements whose norm is taken at a time, by device type: converted in a core's cache, or in few launches."""


class Gradients:
    """Buckets of all stages on this rank: memory of parameters and gradients, accumulation, reduction.

    stages       stage → its units in order of use, (name, module)
    group_of     communication group of some leaf axes, seen from this rank (size 1 when they have size 1)
    copies_of    the group over pp that holds copies of a stage's parameters, or of a tie's (size 1: no other copy)
    """

    def __init__(
        self,
        stages: Mapping[int, list[tuple[str, nn.Module]]],
        mesh: Mesh,
        rank: int,
        policy: Policy,
        group_of: Callable[[tuple[str, ...]], Group],
        copies_of: Callable[[int | str], Group],
        bucket_bytes: int,
        deterministic: bool,
    ) -> None:
        self.mesh, self.rank, self.policy = mesh, rank, policy
        self.group_of, self._copies_of = group_of, copies_of
        self.deterministic = deterministic
        self._roots = [module for units in stages.values() for _, module in units]
        self.buckets: list[Bucket] = []
        self._aliases: dict[int, nn.Parameter] = {}
        """A tied parameter's further tensors on this rank (by id) → the one that is stored."""
        self._make_buckets(stages, bucket_bytes)
        self._view: dict[int, tuple[torch.Tensor, Bucket]] = {}
        self._touched: set[int] = set()
        self._last: dict[int, int] = {}
        self._issued: list[Reduction] = []
        """Of this step, in the order in which all replicas issue them."""
        self._deferred: dict[tuple[int, int], list[WeightGradient]] = {}
        """(stage, micro-batch) whose backward is split → what its BW has to do."""

    def _make_buckets(self, stages: Mapping[int, list[tuple[str, nn.Module]]], bucket_bytes: int) -> None:
        """Buckets of all stages; stages of one rank that use a tied parameter share one tensor of it."""
        ties: dict[str, Entry] = {}
        further: dict[str, list[tuple[int, str]]] = {}
        for stage, units in stages.items():
            entries = []
            for entry in stored_tensors(units):
                tie = entry.stored.members[0].tie
                if tie and tie.group in ties:
                    self._aliases[id(entry.parameter)] = ties[tie.group].parameter
                    further.setdefault(tie.group, []).append((stage, entry.unit))
                    continue
                if tie:
                    ties[tie.group] = entry
                entries.append(entry)
            self.buckets += make_buckets(stage, entries, self.mesh, self.policy, bucket_bytes)
        for bucket in self.buckets:
            bucket.uses += tuple(further.get(bucket.tie or "", ()))

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
        made |= {alias: made[id(owner)] for alias, owner in self._aliases.items()}
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
            bucket.missing = set(bucket.uses)
            assert bucket.reduction is None, "a reduction of the last step was never awaited"

    def _target(self, parameter: torch.Tensor) -> torch.Tensor:
        try:
            view, bucket = self._view[id(parameter)]
        except KeyError:
            raise KeyError("a gradient came for a tensor that no bucket holds") from None
        assert bucket.reduction is None, f"a gradient of {bucket.uses} came after its reduction was issued"
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

    # ---- split backward -------------------------------------------------------------------------------------------

    def split(self, stage: int, micro_batch: int) -> None:
        """Before an input-gradient backward (BI): what layers `defer` waits for `run_deferred`."""
        self._deferred[stage, micro_batch] = []

    def defers(self, stage: int, micro_batch: int) -> bool:
        """Whether weight gradients of this pass wait."""
        return (stage, micro_batch) in self._deferred

    def defer(self, work: WeightGradient, stage: int, micro_batch: int) -> None:
        """Runs a weight gradient in its turn: now, or with the BW of a split backward."""
        queue = self._deferred.get((stage, micro_batch))
        if queue is None:
            work.run()
        else:
            queue.append(work)

    @torch.no_grad()
    def run_deferred(self, stage: int, micro_batch: int) -> None:
        """The BW action: weight gradients in the order of backward, each dropped as soon as it is done."""
        queue = self._deferred.pop((stage, micro_batch))
        queue.reverse()
        while queue:
            work = queue.pop()
            work.issue()
            if queue:
                queue[-1].issue()  # its communication hides behind this one's GEMM
            work.run()

    # ---- reduction ------------------------------------------------------------------------------------------------

    def unit_done(self, unit: str, stage: int, micro_batch: int) -> None:
        """A unit's backward of one micro-batch has ended; after the last one of the step its bucket may go."""
        self.defer(_UnitDone(self, unit, stage, micro_batch), stage, micro_batch)

    def complete(self, unit: str, stage: int, micro_batch: int) -> None:
        """A unit's weight gradients of one micro-batch are there."""
        if self._last.get(stage) == micro_batch:
            self._settle({(stage, unit)})

    def reduce(self, stage: int) -> None:
        """The REDUCE action: issues what is left of the stage (its first unit has no input gradient to end it)."""
        self._settle({use for bucket in self.buckets for use in bucket.missing if use[0] == stage})

    def _settle(self, uses: set[tuple[int, str]]) -> None:
        """These uses have given all their gradients; buckets that wait for no other are issued."""
        for bucket in self.buckets:
            if bucket.missing & uses:
                bucket.missing -= uses
                if not bucket.missing:
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
            self._sum(bucket.gradients, self.copies_of(bucket)).finish()

    def copies_of(self, bucket: Bucket) -> Group:
        """The ranks over pp that hold copies of a bucket: of its tie, or of its stage."""
        return self._copies_of(bucket.tie or bucket.stage)

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
        return span.layout.is_owner(self.mesh, self.rank) and self.copies_of(bucket).index == 0

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


@dataclass(frozen=True, slots=True)
class _UnitDone:
    """The end of a unit in a queue of deferred weight gradients."""

    gradients: Gradients
    unit: str
    stage: int
    micro_batch: int

    def issue(self) -> None:
        pass

    def run(self) -> None:
        self.gradients.complete(self.unit, self.stage, self.micro_batch)
