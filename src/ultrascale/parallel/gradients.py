"""The one place where gradients go, and the one engine that sums them over the mesh.

Layers hand every weight gradient to `accumulate*`; nothing hangs on autograd's hooks. A bucket's reduction is issued as
soon as the last backward of its units has run, as the action list says, while the rest of backward goes on. Everything
is a plain SUM:

1. over the axes that divide the batch, bucket by bucket: an all-reduce, or where the bucket is cut into shards a
   reduce-scatter over the shards and an all-reduce over their copies. Once per step; from ZeRO stage 2 on the
   reduce-scatter comes after every micro-batch, and adds to the shard;
2. over the tensor axes of those members whose uses are divided there too (norms under sequence parallelism, replicated
   KV heads), as one small message of just those members;
3. over the pp coordinates that hold copies: of a tied parameter, or of a whole stage (two-way schedules).

Where a backward is split, weight gradients that a layer hands to `defer` wait in a queue of their (stage, micro-batch)
until the BW action runs it; a unit is done when the queue comes to the end of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.parallel.buckets import Bucket, Use, runs
from ultrascale.parallel.passes import WeightGradient
from ultrascale.parallel.reduction import Reduction
from ultrascale.parallel.store import Store

NORM_PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements whose norm is taken at a time, by device type: converted in a core's cache, or in few launches."""

WHOLE_STEP = (-1, -1)

_Round = tuple[Bucket, int, int]
"""What is reduced at once: a bucket's gradients of a (stage, micro-batch), or those of the WHOLE_STEP (stages 0, 1)."""

UNDER_WAY = 1
"""Reduce-scatters of a micro-batch that may be under way while the next unit's gradients are made (stages 2, 3)."""


class GradientError(Exception):
    """A gradient would be lost: it came when the sum that it belongs to was already on its way."""


class Gradients:
    """Accumulation and reduction of the gradients of a store's buckets.

    deterministic   sum in the order of ranks, whatever the transport would do
    overlap         False: wait for every reduction where it is issued
    """

    def __init__(self, store: Store, deterministic: bool, overlap: bool = True) -> None:
        self.store, self.buckets = store, store.buckets
        self.deterministic, self.overlap = deterministic, overlap
        self.passes_on = store.sharding.stage >= 2
        """Whether gradients leave this rank after every micro-batch, and not once per step."""
        self._touched: set[int] = set()
        self._last: dict[int, int] = {}
        self._issued: list[Reduction] = []
        """In the order in which all replicas issue them."""
        self._missing: dict[_Round, set[Use]] = {}
        """Whose gradients are still to come; empty once the reduction has been issued."""
        self._complete: set[tuple[str, int, int]] = set()
        """(unit, stage, micro-batch) whose gradients are said to be there."""
        self._deferred: dict[tuple[int, int], list[WeightGradient]] = {}
        """(stage, micro-batch) whose backward is split → what its BW has to do."""

    # ---- accumulation (the sink of parallel/passes.py) ------------------------------------------------------------

    def begin_step(self, last_backward: Mapping[int, int]) -> None:
        """Zeroes the gradients; `last_backward` says for each stage the micro-batch whose backward comes last."""
        if self._issued:
            raise GradientError(
                "gradients of the last step are still on their way; call Gradients.finish() before another"
            )
        self._last = dict(last_backward)
        self._missing = {}
        self._complete = set()
        for bucket in self.buckets:
            bucket.gradients.zero_()
            if bucket.accumulator is not None:
                bucket.accumulator.zero_()

    def _target(self, parameter: torch.Tensor, stage: int, micro_batch: int) -> torch.Tensor:
        """Where a parameter's gradients are added up. Raises GradientError when their sum is on its way."""
        try:
            bucket, start, shape = self.store.place[id(parameter)]
        except KeyError:
            raise KeyError("a gradient came for a tensor that no bucket holds") from None
        if self._missing.get(self._round(bucket, stage, micro_batch)) == set():
            names = ", ".join(span.layout.name for span in bucket.spans if span.start <= start < span.stop)
            raise GradientError(
                f"a gradient of {names} came after its reduction was issued; use a parameter only inside units that "
                "hold it (run_unit), and give a unit that is run twice a name for each time in units()"
            )
        self._touched.add(id(parameter))
        if bucket.accumulator is None:
            bucket.accumulator = bucket.gradients.new_zeros(bucket.numel)
        return bucket.accumulator[start : start + prod(shape)].view(shape)

    def _round(self, bucket: Bucket, stage: int, micro_batch: int) -> _Round:
        return (bucket, stage, micro_batch) if self.passes_on else (bucket, *WHOLE_STEP)

    def accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor, stage: int, micro_batch: int) -> None:
        self._target(parameter, stage, micro_batch).add_(gradient)

    def accumulate_product(
        self, parameter: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, stage: int, micro_batch: int
    ) -> None:
        _add_product(self._target(parameter, stage, micro_batch)[: dy.shape[1]], dy, x)

    def accumulate_products(
        self,
        parameter: torch.Tensor,
        dy: torch.Tensor,
        x: torch.Tensor,
        counts: Sequence[int],
        stage: int,
        micro_batch: int,
    ) -> None:
        parts = dy.split(list(counts)), x.split(list(counts))
        for target, dy_part, x_part in zip(self._target(parameter, stage, micro_batch), *parts, strict=True):
            _add_product(target, dy_part, x_part)

    def accumulate_rows(
        self,
        parameter: torch.Tensor,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        stage: int,
        micro_batch: int,
    ) -> None:
        target = self._target(parameter, stage, micro_batch)
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
        """A unit's backward of one micro-batch has ended; its bucket's reduction may be due."""
        self.defer(_UnitDone(self, unit, stage, micro_batch), stage, micro_batch)

    def complete(self, unit: str, stage: int, micro_batch: int) -> None:
        """A unit's weight gradients of one micro-batch are there. Raises GradientError when they have been before."""
        if (unit, stage, micro_batch) in self._complete:
            raise GradientError(
                f"the unit {unit} was run twice in one pass, and its gradients were sent after the first; list it in "
                "units() once for each time, under names of their own"
            )
        self._complete.add((unit, stage, micro_batch))
        self._settle(stage, micro_batch, [unit])

    def reduce(self, stage: int, micro_batch: int) -> None:
        """The REDUCE action: issues what is left of the stage (its first unit has no input gradient to end it).

        micro_batch   whose gradients are meant; where they are reduced once per step, that of the last backward
        """
        self._settle(stage, micro_batch, self.store.units[stage])

    def _settle(self, stage: int, micro_batch: int, units: list[str]) -> None:
        """These units have given all their gradients of a micro-batch; buckets that wait for no other are issued."""
        if not self.passes_on and self._last.get(stage) != micro_batch:
            return
        done = {(stage, unit) for unit in units}
        for bucket in self.buckets:
            key = self._round(bucket, stage, micro_batch)
            missing = self._missing.get(key)
            if missing is None:
                missing = {use for use in bucket.uses if not self.passes_on or use[0] == stage}
            if missing & done:
                self._missing[key] = missing - done
                if missing <= done:
                    self._issue(bucket)

    def _issue(self, bucket: Bucket) -> None:
        """Issues a bucket's reduction, and the second half of those that have had time to arrive: pieces are freed."""
        if bucket.accumulator is None:
            # No gradient here, as for an expert without tokens; but replicas have some, and wait.
            bucket.accumulator = bucket.gradients.new_zeros(bucket.numel)
        for earlier in self._issued[:-1]:
            earlier.advance()
        while self.passes_on and len(self._issued) >= UNDER_WAY:
            self._issued.pop(0).finish()
        self._issued.append(self._sum_over_batch(bucket))
        if self.passes_on:
            bucket.accumulator = None
        if not self.overlap:
            self._issued.pop().finish()

    def _sum_over_batch(self, bucket: Bucket) -> Reduction:
        """What is due when a bucket's gradients are there, issued."""
        flat, target = bucket.accumulator, bucket.gradients
        assert flat is not None
        if not bucket.shard_axes:
            return self._sum(flat, self.store.group_of(bucket.axes), target)
        group = self.store.group_of(bucket.shard_axes)
        with group.ledger.during("reduce"):
            message = flat if group.size == 1 else flat.to(self.store.policy.reduce)
            pending = collectives.reduce_scatter(message, group, in_rank_order=self.deterministic)
        return Reduction(group, pending, target, adds=self.passes_on)

    def _sum(self, flat: torch.Tensor, group: Group, target: torch.Tensor | None = None) -> Reduction:
        """SUM of a flat buffer over the group, issued. Where nothing travels, nothing is rounded."""
        target = flat if target is None else target
        if group.size == 1:
            return Reduction(group, Pending(flat), target)
        message = flat.to(self.store.policy.reduce)
        operation = collectives.deterministic_all_reduce if self.deterministic else collectives.all_reduce
        with group.ledger.during("reduce"):
            pending = operation(message, group)
        return Reduction(group, pending, target)

    def finish(self) -> None:
        """Waits for all buckets, then sums over copies of shards, tensor axes and ties. Then gradients are whole."""
        reduced = {bucket for (bucket, *_), missing in self._missing.items() if not missing}
        assert len(reduced) == len(self.buckets), "a stage was never reduced: the plan has no REDUCE for it"
        for reduction in self._issued:
            reduction.advance()
        for reduction in self._issued:
            reduction.finish()
        self._issued = []
        copies = [
            self._sum(bucket.gradients, self.store.group_of(self.store.replicas_of(bucket)))
            for bucket in self.buckets
            if bucket.shard_axes
        ]
        for reduction in copies:
            reduction.advance()
        for reduction in copies:
            reduction.finish()
        for axes, parts in self._tensor_sums().items():
            self._sum_parts(parts, self.store.group_of(axes))
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.tie or ""):
            # Stages in the order of the model, then ties: one order on all ranks, whichever of them each one holds.
            self._sum(bucket.gradients, self.store.copies_of(bucket)).finish()

    def _tensor_sums(self) -> dict[tuple[str, ...], list[torch.Tensor]]:
        """Axes beyond the batch's → this rank's part of the members whose gradients arrive in parts over them too."""
        mesh = self.store.mesh
        sums: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for bucket in self.buckets:
            for span in bucket.spans:
                axes = tuple(a for a in span.layout.gradient_axes(mesh) if a not in bucket.axes)
                start, stop = bucket.shard(span)
                if mesh.size(axes) > 1 and start < stop:
                    sums.setdefault(axes, []).append(bucket.gradients[start:stop])
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
        mesh, rank = self.store.mesh, self.store.rank
        return [
            layout.name
            for bucket in self.buckets
            for entry in bucket.entries
            if id(entry.parameter) not in self._touched
            for layout in entry.stored.members
            if prod(layout.box(mesh, rank)[1])
        ]

    @torch.no_grad()
    def square_sum(self) -> torch.Tensor:
        """This rank's share of the squared global norm, float64 scalar; over the world each element is in once."""
        device = self.buckets[0].gradients.device if self.buckets else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self.buckets:
            for start, stop in runs(bucket.spans, partial(self.store.counts, bucket)):
                start, stop = max(start, bucket.lo) - bucket.lo, min(stop, bucket.hi) - bucket.lo
                # In float64, so that the norm does not depend on how elements are grouped; piece by piece, since each
                # piece is converted whole.
                for piece in bucket.gradients[start : max(start, stop)].split(NORM_PIECE[device.type]):
                    total += torch.linalg.vector_norm(piece, dtype=torch.float64).square()
        return total


def _add_product(target: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """target += dyᵀ·x"""
    if dy.dtype == target.dtype:
        target.addmm_(dy.t(), x)
    else:
        target.add_(dy.t().mm(x))


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
