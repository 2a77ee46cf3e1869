"""One step, and one evaluation, of what `assembly` built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ultrascale.assembly import Assembly
from ultrascale.comm import collectives
from ultrascale.data.loader import MicroArrays
from ultrascale.models import mtp
from ultrascale.models.batch import MicroBatch, Padding, StepBatch
from ultrascale.models.moe import balance_routers
from ultrascale.observe.memory import peak_memory
from ultrascale.optim.optimizer import clip_coefficient
from ultrascale.optim.schedule import learning_rate
from ultrascale.parallel.context.split import Cut, Ints, own_places, padded_length
from ultrascale.parallel.cross_entropy import NO_TARGET
from ultrascale.parallel.experts.router import Router


@dataclass(frozen=True)
class StepResult:
    """One step as all ranks know it."""

    report: Mapping[str, float]
    """`loss`, the objective whose gradient was applied, and each of its terms."""
    grad_norm: float
    """Of the global gradient, before clipping."""
    lr: float
    stop: bool
    """Whether any rank wants to stop after this step."""
    save: bool
    """Whether any rank wants it saved."""
    finite: bool
    """False: loss or gradient were not finite, and no parameter was touched."""
    peak_memory_bytes: int
    """The largest over ranks."""
    load: torch.Tensor | None
    """int64 [sparse layers, experts]: tokens that chose each expert; None without experts."""
    dropped: torch.Tensor | None
    """int64 [sparse layers]: choices for which experts had no room; None where their room has no limit."""
    router_bias_range: tuple[float, float] | None
    """Smallest and largest bias of all routers, as this step's tokens met them; None where routers have none."""


def step_batch(assembly: Assembly, arrays: Sequence[MicroArrays]) -> StepBatch:
    """This rank's tokens of its replica's arrays, with the denominators of the global batch."""
    return with_denominators(assembly, [micro_batch(assembly, a) for a in arrays])


def micro_batch(assembly: Assembly, arrays: MicroArrays) -> MicroBatch:
    """Whole sequences → what this cp rank holds of them: labels were shifted before, and everything follows its token.

    The one place where `context.pad` lengthens a sequence: by a document of its own that holds no target.
    """
    config, cut = assembly.config, Cut.of(assembly.config)
    length, documents = config.batch.sequence_length, arrays.documents
    padding = padded_length(config) - length
    if padding:
        documents = tuple((*row, length) for row in documents or ((0,),) * arrays.inputs.shape[1])

    places = own_places(length + padding, documents, cut, assembly.mesh.index(assembly.rank, ["cp"]))
    columns = np.arange(arrays.inputs.shape[1])

    def own(x: Ints, fill: int) -> torch.Tensor:
        padded = np.pad(x, ((0, padding), (0, 0)), constant_values=fill)
        return torch.from_numpy(padded[places, columns]).to(assembly.device)

    real = None
    if padding or arrays.padding.any():
        lengths = length - arrays.padding
        is_text = np.arange(length)[:, None] < lengths
        real = Padding(own(is_text.astype(np.int64), 0).bool(), torch.from_numpy(lengths).to(assembly.device))
    return MicroBatch(
        inputs=own(arrays.inputs, 0),
        labels=tuple(own(labels, NO_TARGET) for labels in (arrays.labels, *arrays.further_labels)),
        further_inputs=tuple(own(ids, 0) for ids in arrays.further_inputs),
        positions=own(arrays.positions, 0),
        documents=documents,
        padding=real,
        places=torch.from_numpy(np.broadcast_to(places, (places.shape[0], columns.size)).copy()).to(assembly.device),
        samples=torch.from_numpy(arrays.samples).to(assembly.device),
    )


def with_denominators(assembly: Assembly, micro_batches: Sequence[MicroBatch]) -> StepBatch:
    """Counts targets (of each depth), tokens and rows of the global batch, in one small all-reduce, before anything is
    computed."""
    depths = range(assembly.config.model.num_nextn_predict_layers)
    names = ["targets", *(mtp.targets(depth) for depth in depths), "tokens", "rows"]
    targets = [sum(int((m.labels[i] != NO_TARGET).sum()) for m in micro_batches) for i in range(1 + len(depths))]
    first = assembly.mesh.index(assembly.rank, ["cp"]) == 0  # all cp ranks hold parts of the same rows
    rows = sum(m.inputs.shape[1] for m in micro_batches) if first else 0
    tokens = sum(m.inputs.numel() if m.padding is None else int(m.padding.real.sum()) for m in micro_batches)
    counts = torch.tensor([*targets, tokens, rows], dtype=torch.int64, device=assembly.device)
    group = assembly.groups.of(["dp", "ep", "cp"])
    with group.ledger.during("batch"):
        collectives.all_reduce(counts, group).wait()
    return StepBatch(micro_batches, dict(zip(names, counts.tolist(), strict=True)))


def train_step(
    assembly: Assembly, batch: StepBatch, step: int, wishes: Callable[[], tuple[bool, bool]] = lambda: (False, False)
) -> StepResult:
    """Forward and backward by the schedule, reduce, clip, update.

    step   number of this optimizer step, from 1
    wishes   whether this rank wants to stop, and to save, asked at the step's end; the result says whether any does
    """
    config, gradients = assembly.config, assembly.gradients
    outputs = assembly.engine.run(batch)
    gradients.finish()

    # What all ranks must agree on travels in one message; every rank adds the rows up in the same order.
    sums, largest = term_sums(assembly, outputs), largest_here(assembly)
    asked = sums.new_tensor([float(wish) for wish in wishes()])
    message = torch.cat([gradients.square_sum().view(1), sums, asked, largest])
    world = assembly.groups.world
    with world.ledger.during("step"):
        rows = collectives.all_gather(message.view(1, -1), world).wait()
    summed, maxima = rows.split([rows.shape[1] - largest.numel(), largest.numel()], dim=1)
    square_sum, *totals, stops, saves = summed.sum(dim=0).tolist()
    memory, *biases = maxima.amax(dim=0).tolist()
    report = assembly.objective.report(dict(zip(assembly.objective.terms, totals, strict=True)), batch.denominators)
    norm = math.sqrt(square_sum) if math.isfinite(square_sum) else square_sum
    finite = math.isfinite(norm) and math.isfinite(report["loss"])
    lr = learning_rate(step, config)
    load, dropped = assembly.load.collect(world) if assembly.load is not None else (None, None)
    if finite:
        assembly.optimizer.step(step, lr, clip_coefficient(norm, config.optimizer.max_norm))
        if assembly.load is not None and load is not None:
            balance_routers(assembly.stages.values(), dict(zip(assembly.load.layers, load, strict=True)))
    bias_range = (0.0 - biases[0], biases[1]) if biases else None  # 0 − 0 has no sign
    limited = config.model.expert_capacity_factor is not None
    return StepResult(
        report, norm, lr, stops > 0, saves > 0, finite, int(memory), load, dropped if limited else None, bias_range
    )


def largest_here(assembly: Assembly) -> torch.Tensor:
    """What of this rank counts by its largest over ranks, float64: peak memory; −smallest and largest router bias."""
    memory = torch.tensor([peak_memory(assembly.device).peak], dtype=torch.float64, device=assembly.device)
    if assembly.config.model.router_bias_update_rate is None:
        return memory
    kept = assembly.store.kept
    biases = [k.tensor for k in kept if isinstance(k.module, Router) and k.attribute == "bias"]
    if not biases:  # this rank has dense layers only
        return torch.cat([memory, memory.new_full((2,), -torch.inf)])
    low, high = torch.cat(biases).to(memory).aminmax()
    return torch.cat([memory, torch.stack([-low, high])])


def evaluate(assembly: Assembly, batches: Sequence[StepBatch]) -> float:
    """Mean loss per target over whole global batches; changes nothing."""
    total, targets = 0.0, 0
    world = assembly.groups.world
    for batch in batches:
        sums = term_sums(assembly, assembly.evaluation.run(batch))
        with world.ledger.during("evaluation"):
            collectives.all_reduce(sums, world).wait()
        total += sums[list(assembly.objective.terms).index("lm")].item()
        targets += batch.denominators["targets"]
    return total / max(1, targets)


def term_sums(assembly: Assembly, outputs: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """This rank's share of each term's global sum, float64 [terms]: tp ranks hold equal sums, and one counts."""
    names = list(assembly.objective.terms)
    sums = torch.zeros(len(names), dtype=torch.float64, device=assembly.device)
    if assembly.mesh.index(assembly.rank, ["tp"]) == 0:
        for output in outputs:
            for index, name in enumerate(names):
                if name in output:  # a stage returns the terms of what lies on it
                    sums[index] += output[name].to(torch.float64)
    return sums
