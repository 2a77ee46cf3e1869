"""Faults that are seeded into product code, to see the parity comparison go red.

Each one is a mistake that was made somewhere: a reduction forgotten, doubled, averaged or done over the wrong ranks.
It replaces one function of the product while a cell runs; the comparison itself is never touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import faults_context  # noqa: F401  (the siblings fill the register too)
import faults_experts  # noqa: F401
import faults_further  # noqa: F401
import faults_latent  # noqa: F401
import torch
from fault_registry import FAULTS, Patch, fault, seeded

from ultrascale import step as stepping
from ultrascale.assembly import Assembly
from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.data.loader import NO_TARGET, Data, MicroArrays
from ultrascale.models.batch import MicroBatch, StepBatch
from ultrascale.optim.muon import newton_schulz
from ultrascale.optim.whole_matrices import WholeMatrices
from ultrascale.parallel import init
from ultrascale.parallel.buckets import Bucket
from ultrascale.parallel.gradients import Gradients
from ultrascale.parallel.reduction import Reduction
from ultrascale.parallel.store import Store
from ultrascale.parallel.weights import Weights
from ultrascale.pipeline.engine import Engine

__all__ = ["FAULTS", "seeded"]


@fault
def tensor_sums_are_skipped() -> Patch:
    """Norms under sequence parallelism and replicated KV heads keep each tp rank's own part."""
    return patch.object(Gradients, "_tensor_sums", lambda self: {})


@fault
def batch_sums_are_doubled() -> Patch:
    """Every bucket is reduced twice."""
    original = Gradients._sum

    def twice(self: Gradients, flat: torch.Tensor, group: Any, target: torch.Tensor | None = None) -> Reduction:
        original(self, flat, group, target).finish()
        return original(self, flat, group, target)

    return patch.object(Gradients, "_sum", twice)


@fault
def batch_sums_are_averages() -> Patch:
    """The reductions divide by the number of ranks."""
    original = Reduction.finish

    def average(self: Reduction) -> None:
        original(self)
        self.target.div_(2)

    return patch.object(Reduction, "finish", average)


@fault
def ties_are_forgotten() -> Patch:
    """Embedding and head on different stages keep their own gradients."""
    return patch.object(Store, "copies_of", lambda self, bucket: self.group_of(()))


@fault
def second_copies_keep_their_own_gradients() -> Patch:
    """A schedule that runs in both directions holds every stage twice, and each copy sees half of the micro-batches."""
    original = Store.copies_of
    return patch.object(
        Store, "copies_of", lambda self, bucket: original(self, bucket) if bucket.tie else self.group_of(())
    )


@fault
def deferred_weight_gradients_of_a_micro_batch_are_lost() -> Patch:
    """One BW comes to an empty queue."""
    original = Gradients.run_deferred

    def run_deferred(self: Gradients, stage: int, micro_batch: int) -> None:
        if micro_batch == 1:
            self._deferred[stage, micro_batch].clear()
        original(self, stage, micro_batch)

    return patch.object(Gradients, "run_deferred", run_deferred)


@fault
def deferred_weight_gradients_belong_to_the_stage_alone() -> Patch:
    """A queue is known by its stage: the next micro-batch's BI throws away what the last one left."""
    original = Gradients.split

    def split(self: Gradients, stage: int, micro_batch: int) -> None:
        for key in self._deferred:
            if key[0] == stage:
                self._deferred[key] = []
        original(self, stage, micro_batch)

    return patch.object(Gradients, "split", split)


@fault
def micro_batches_overwrite_a_shards_gradient() -> Patch:
    """A reduce-scatter of every micro-batch takes the place of the last one's sum."""
    original = Reduction.finish
    return patch.object(Reduction, "finish", lambda self: original(dataclasses.replace(self, adds=False)))


@fault
def copies_of_a_shard_are_not_summed() -> Patch:
    """Shard × replicate without the all-reduce over replicate."""
    return patch.object(Store, "replicas_of", lambda self, bucket: ())


@fault
def weights_are_not_gathered_after_a_step() -> Patch:
    """Each rank goes on with its own new shard and the others' old ones."""
    original = Weights.publish

    def first_only(self: Weights) -> None:
        if not hasattr(self, "published"):
            self.published = True  # type: ignore[attr-defined]
            original(self)

    return patch.object(Weights, "publish", first_only)


@fault
def weights_of_the_wrong_shard_are_gathered() -> Patch:
    """Shards are joined in another order than they were cut."""
    original = collectives.all_gather

    def rolled(tensor: torch.Tensor, group: Any, into: torch.Tensor | None = None) -> Pending:
        pending = original(tensor, group, into)
        if into is not None and group.ledger.phase == "gather":
            into.copy_(pending.wait().roll(tensor.numel()))
        return pending

    return patch.object(collectives, "all_gather", rolled)


@fault
def batches_are_summed_over_the_wrong_group() -> Patch:
    """Buckets are reduced over tp instead of over the replicas."""

    def over_tp(self: Gradients, bucket: Bucket) -> Reduction:
        return self._sum(bucket.gradients, self.store.group_of(("tp",)))

    return patch.object(Gradients, "_sum_over_batch", over_tp)


@fault
def last_micro_batch_is_dropped() -> Patch:
    """The weight gradients of the last micro-batch of a step are not accumulated."""
    patches = contextlib.ExitStack()
    for name in ("accumulate", "accumulate_product", "accumulate_rows"):
        original = getattr(Gradients, name)

        def without_last(self: Gradients, *args: Any, original: Any = original) -> None:
            stage, micro_batch = args[-2:]
            if micro_batch != self._last[stage]:
                original(self, *args)

        patches.enter_context(patch.object(Gradients, name, without_last))
    return patches


@fault
def denominators_are_local() -> Patch:
    """Each replica divides by its own number of targets: a mean of means when masks are uneven."""

    def local(assembly: Assembly, micro_batches: Sequence[MicroBatch]) -> StepBatch:
        replicas = assembly.mesh.size(["dp", "ep", "cp"])
        targets = sum(int((m.labels[0] != NO_TARGET).sum()) for m in micro_batches)
        rows = sum(m.inputs.shape[1] for m in micro_batches)
        return StepBatch(micro_batches, {"targets": targets * replicas, "rows": rows * replicas})

    return patch.object(stepping, "with_denominators", local)


@fault
def replicated_parameters_count_twice_in_the_norm() -> Patch:
    """Every rank counts what it holds."""
    return patch.object(Store, "counts", lambda self, bucket, span: True)


@fault
def labels_are_shifted_after_the_cut() -> Patch:
    """The last target of every sequence is lost, as when each piece shifts its own labels."""
    original = Data.batch

    def batch(self: Data, *args: Any, **kwargs: Any) -> list[MicroArrays]:
        found = []
        for arrays in original(self, *args, **kwargs):
            labels = arrays.labels.copy()
            labels[-1] = NO_TARGET
            found.append(dataclasses.replace(arrays, labels=labels))
        return found

    return patch.object(Data, "batch", batch)


@fault
def layers_are_numbered_within_the_stage() -> Patch:
    """A stage's second half of the model starts from the values of the first."""
    original = init.key_of

    def key_of(seed: int, name: str) -> tuple[int, int]:
        return original(seed, re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) % 2}", name))

    return patch.object(init, "key_of", key_of)


@fault
def input_gradients_are_not_summed_over_tp() -> Patch:
    """A column-parallel layer hands back its own share of the input gradient."""
    original = collectives.all_reduce

    def all_reduce(tensor: torch.Tensor, group: Any, op: Any = "sum") -> Pending:
        skipped = group.axes == ("tp",) and group.ledger.phase == "backward"
        return Pending(tensor) if skipped else original(tensor, group, op)

    return patch.object(collectives, "all_reduce", all_reduce)


@fault
def second_use_of_a_tied_parameter_overwrites_the_first() -> Patch:
    """The embedding's gradient replaces the head's."""
    original = Gradients.accumulate_rows

    def overwrite(self: Gradients, parameter: torch.Tensor, *args: Any) -> None:
        self._target(parameter, *args[-2:]).zero_()
        original(self, parameter, *args)

    return patch.object(Gradients, "accumulate_rows", overwrite)


@fault
def gradients_between_stages_are_doubled() -> Patch:
    """What a stage sends back is scaled, as by a loss scale that was applied twice."""
    original = Engine._hand_over

    def doubled(self: Engine, payload: str, source: int, target: int, micro_batch: int, tensor: torch.Tensor) -> None:
        original(self, payload, source, target, micro_batch, tensor * 2 if payload == "gradient" else tensor)

    return patch.object(Engine, "_hand_over", doubled)


@fault
def weights_are_updated_by_local_gradients_on_one_rank() -> Patch:
    """One replica updates with a learning rate of its own: copies drift apart."""
    original = stepping.learning_rate

    def rate(step: int, config: Any) -> float:
        alone = torch.distributed.get_rank() == 1
        return original(step, config) * (1.5 if alone else 1.0)

    return patch.object(stepping, "learning_rate", rate)


@fault
def pieces_of_matrices_are_made_orthogonal() -> Patch:
    """Muon without its exchange: each rank takes its own piece for the matrix (DeepSpeed#8437)."""
    gather, scatter = WholeMatrices.gather, WholeMatrices.scatter
    kept: list[torch.Tensor] = []

    def keeping(self: WholeMatrices, piece: Any, like: torch.Tensor) -> Pending:
        kept[:] = [newton_schulz(piece(part)).flatten() for parts in self._returned for part in parts]
        return gather(self, piece, like)

    def own(self: WholeMatrices, matrices: Sequence[torch.Tensor], like: torch.Tensor) -> Pending:
        scatter(self, matrices, like).wait()
        return Pending(torch.cat(kept))

    patches = contextlib.ExitStack()
    patches.enter_context(patch.object(WholeMatrices, "gather", keeping))
    patches.enter_context(patch.object(WholeMatrices, "scatter", own))
    return patches
