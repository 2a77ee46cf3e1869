"""Faults that are seeded into product code, to see the parity comparison go red.

Each one is a mistake that was made somewhere: a reduction forgotten, doubled, averaged or done over the wrong ranks.
It replaces one function of the product while a cell runs; the comparison itself is never touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from ultrascale import step as stepping
from ultrascale.assembly import Assembly
from ultrascale.comm import collectives, differentiable
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.data.loader import NO_TARGET, Data, MicroArrays
from ultrascale.models import mla, moe
from ultrascale.models.batch import MicroBatch, StepBatch
from ultrascale.optim.muon import newton_schulz
from ultrascale.optim.whole_matrices import WholeMatrices
from ultrascale.parallel import init, tensor
from ultrascale.parallel.buckets import Bucket
from ultrascale.parallel.context import ring
from ultrascale.parallel.context.attention import ContextAttention
from ultrascale.parallel.context.split import CONTIGUOUS
from ultrascale.parallel.context.ulysses import Exchange
from ultrascale.parallel.experts.dispatch import Dispatch
from ultrascale.parallel.experts.load import ExpertLoad
from ultrascale.parallel.experts.router import Router
from ultrascale.parallel.gradients import Gradients
from ultrascale.parallel.layout import Layout, Use
from ultrascale.parallel.reduction import Reduction
from ultrascale.parallel.store import Store
from ultrascale.parallel.weights import Weights
from ultrascale.pipeline.engine import Engine

Patch = contextlib.AbstractContextManager[Any]
FAULTS: dict[str, Callable[[], Patch]] = {}


def fault(function: Callable[[], Patch]) -> Callable[[], Patch]:
    FAULTS[function.__name__] = function
    return function


@contextlib.contextmanager
def seeded(name: str | None) -> Iterator[None]:
    """The product with one fault in it; None: as it is."""
    with FAULTS[name]() if name else contextlib.nullcontext():
        yield


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


@fault
def gradients_are_not_summed_over_cp() -> Patch:
    """Each cp rank keeps what its own tokens say."""
    original = Layout.gradient_axes

    def without_cp(self: Layout, mesh: Any) -> tuple[str, ...]:
        return tuple(leaf for leaf in original(self, mesh) if not leaf.startswith("cp"))

    return patch.object(Layout, "gradient_axes", without_cp)


@fault
def parts_of_attention_are_averaged() -> Patch:
    """What ring steps give is joined without regard to how much each has seen."""

    def average(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        out.add_(part).div_(2)

    return patch.object(ring, "merge", average)


@fault
def gradients_of_keys_do_not_come_home() -> Patch:
    """Forward is right; what the others made of a rank's keys is lost."""

    def own_part(self: Any) -> ring.Block:
        self._sending.wait()
        self._home.wait()
        return self._here  # type: ignore[no-any-return]

    return patch.object(ring._Gradients, "of_own", own_part)


@fault
def a_blocks_gradient_is_overwritten_on_its_way() -> Patch:
    """Each place sends its own part on, and not the sum."""
    original = ring._Gradients.add

    def add(self: Any, step: int, part: Any) -> None:
        coming = self._coming
        self._coming = ring.Nothing(self.group)
        original(self, step, part)
        coming.wait()

    return patch.object(ring._Gradients, "add", add)


def _called_with(**fixed: Any) -> Patch:
    original = ContextAttention.__call__

    def call(self: ContextAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> torch.Tensor:
        keywords = dict(zip(("documents", "window", "scale"), given))
        return original(self, q, k, v, **{**keywords, **fixed})

    return patch.object(ContextAttention, "__call__", call)


@fault
def documents_are_ignored_by_attention() -> Patch:
    """Packed documents see each other."""
    return _called_with(documents=None)


@fault
def windows_are_ignored_by_attention() -> Patch:
    """A sliding window is silently dropped."""
    return _called_with(window=None)


@fault
def masks_are_those_of_another_split() -> Patch:
    """Tokens are cut by zigzag, and masked as if they were contiguous."""
    original = ContextAttention.of

    def contiguous(*args: Any, **kwargs: Any) -> ContextAttention:
        attention = original(*args, **kwargs)
        attention.meeting.cut = dataclasses.replace(attention.cut, kind=CONTIGUOUS)
        return attention

    return patch.object(ContextAttention, "of", contiguous)


@fault
def copies_of_a_key_head_keep_their_own_gradients() -> Patch:
    """Of the ranks to which Ulysses sends one KV head only the first one's gradient counts."""

    def first(self: Exchange, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, kv_heads: int) -> Any:
        dq, dk, dv = self._gathered(dq, dk, dv)
        return dq, dk.unflatten(2, (kv_heads, -1))[:, :, :, 0], dv.unflatten(2, (kv_heads, -1))[:, :, :, 0]

    return patch.object(Exchange, "to_tokens_gradients", first)


@fault
def gradients_of_the_shared_key_are_not_summed() -> Patch:
    """Each tp rank keeps what its own heads say of the key that all heads share."""
    patches = contextlib.ExitStack()
    patches.enter_context(patch.object(differentiable, "gather", differentiable.gather_copies))
    patches.enter_context(patch.object(differentiable, "copy_to", lambda x, group: x))
    return patches


@fault
def weights_that_make_latents_keep_their_own_tokens_gradients() -> Patch:
    """Under sequence parallelism each tp rank makes the latents of its own tokens; a layout that says otherwise."""
    original = mla.replicated_matrix

    def used_alike(*args: Any) -> Layout:
        return dataclasses.replace(original(*args), used_in=Use.WHOLE)

    return patch.object(mla, "replicated_matrix", used_alike)


@fault
def gradients_of_latents_are_not_summed() -> Patch:
    """What the heads of one tp rank say of a latent goes back through weights that all ranks hold."""
    original = tensor.column_parallel

    def column_parallel(
        x: torch.Tensor, weight: torch.Tensor, group: Group, sequence_parallel: bool, current: Any, name: str = ""
    ) -> torch.Tensor:
        if name.endswith("_b_proj.weight") and not sequence_parallel:
            group = Group((), (group.ranks[group.index],), 0, None, group.ledger)
        return original(x, weight, group, sequence_parallel, current, name)

    return patch.object(tensor, "column_parallel", column_parallel)


def _cut_otherwise(change: Callable[[MicroBatch], MicroBatch]) -> Patch:
    original = stepping.micro_batch
    return patch.object(stepping, "micro_batch", lambda assembly, arrays: change(original(assembly, arrays)))


@fault
def positions_restart_at_the_cut() -> Patch:
    """Each cp rank counts its own tokens from 0."""

    def restart(batch: MicroBatch) -> MicroBatch:
        places = torch.arange(batch.positions.shape[0]).unsqueeze(1).expand(batch.positions.shape)
        return dataclasses.replace(batch, positions=places.contiguous())

    return _cut_otherwise(restart)


@fault
def each_cut_loses_a_target() -> Patch:
    """Labels are shifted after the cut: a piece's last token has none."""

    def without_last(batch: MicroBatch) -> MicroBatch:
        labels = batch.labels[0].clone()
        labels[-1] = NO_TARGET
        return dataclasses.replace(batch, labels=(labels,))

    return _cut_otherwise(without_last)


@fault
def experts_are_summed_over_all_replicas_of_dense_layers() -> Patch:
    """Gradients of different experts are added, as if each rank held the same ones."""
    original = Layout.gradient_axes

    def dense(self: Layout, mesh: Any) -> tuple[str, ...]:
        return mesh.expand(("dp", "ep", "cp")) if "experts" in self.name else original(self, mesh)

    return patch.object(Layout, "gradient_axes", dense)


@fault
def routers_are_taken_for_replicated_over_tp() -> Patch:
    """The router's gradient stays each tp rank's own, though each sees other tokens."""
    original = Layout.gradient_axes

    def without_tp(self: Layout, mesh: Any) -> tuple[str, ...]:
        axes = original(self, mesh)
        return tuple(a for a in axes if not a.startswith("kv_")) if "router" in self.name else axes

    return patch.object(Layout, "gradient_axes", without_tp)


@fault
def outputs_of_experts_are_not_weighted() -> Patch:
    """Combine forgets the router's weights."""
    original = Router.forward

    def unweighted(self: Router, *args: Any) -> Any:
        routing = original(self, *args)
        return dataclasses.replace(routing, weights=torch.ones_like(routing.weights))

    return patch.object(Router, "forward", unweighted)


@fault
def balance_counts_only_tokens_of_this_rank() -> Patch:
    """The auxiliary loss takes local counts for those of the whole row."""
    original = moe.balance_sum

    def local(routing: Any, rows: int, per_row: int, row_group: Any) -> torch.Tensor:
        alone = dataclasses.replace(row_group, ranks=(row_group.ranks[row_group.index],), index=0)
        return original(routing, rows, per_row, alone)

    return patch.object(moe, "balance_sum", local)


@fault
def auxiliary_terms_are_scaled_by_the_number_of_ranks() -> Patch:
    """Each rank's gradient of the auxiliary loss is that of the whole."""
    original = moe.reduce_from
    return patch.object(moe, "reduce_from", lambda term, group: original(term, group) * group.size)


@fault
def rows_come_back_in_the_order_of_experts() -> Patch:
    """The way back forgets that rows were sorted by expert on arrival."""
    original = Dispatch.to_tokens

    def unsorted(self: Dispatch, y: torch.Tensor, route: Any) -> torch.Tensor:
        return original(self, y, dataclasses.replace(route, by_expert=torch.arange(route.by_expert.numel())))

    return patch.object(Dispatch, "to_tokens", unsorted)


@fault
def tokens_are_counted_again_when_recomputed() -> Patch:
    """What a forward counts is added up, and recomputation is a forward: the layers of a recomputed block twice."""

    def record(self: ExpertLoad, layer: int, micro_batch: int, counts: torch.Tensor) -> None:
        known = self._seen.get((layer, micro_batch))
        # Twice the same would leave every sign as it is; tokens of early micro-batches count twice, as under 1F1B.
        self._seen[layer, micro_batch] = counts if known is None else known + counts * (micro_batch == 0)

    return patch.object(ExpertLoad, "record", record)


@fault
def routers_are_balanced_by_local_counts() -> Patch:
    """Each rank moves its biases by what its own tokens chose."""
    original = ExpertLoad.collect

    def collect(self: ExpertLoad, world: Any) -> torch.Tensor:
        alone = dataclasses.replace(world, ranks=(world.ranks[world.index],), index=0)
        return original(self, alone)

    return patch.object(ExpertLoad, "collect", collect)


@fault
def biases_are_held_in_bfloat16() -> Patch:
    """Biases follow the weights into the compute dtype, where small steps are lost."""
    original = Router.balance

    def balance(self: Router, counts: torch.Tensor) -> None:
        original(self, counts)
        self.bias.copy_(self.bias.to(torch.bfloat16))

    return patch.object(Router, "balance", balance)
