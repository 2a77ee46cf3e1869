"""Tiny models on one process or a pool: a config by its dotted keys, a rank's assembly, a batch drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pool import Context
from ultrascale.assembly import Assembly, assemble, planned_groups
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config
from ultrascale.data.loader import MicroArrays
from ultrascale.kernels.attention_reference import ReferenceAttention
from ultrascale.mesh.axes import Mesh
from ultrascale.models.batch import StepBatch
from ultrascale.parallel.buckets import Bucket, Span
from ultrascale.parallel.context.attention import ContextAttention
from ultrascale.parallel.context.split import Documents
from ultrascale.parallel.cross_entropy import NO_TARGET
from ultrascale.parallel.experts.dispatch import ExpertGroups
from ultrascale.parallel.experts.placement import Placement
from ultrascale.parallel.module import Build
from ultrascale.parallel.store import Store
from ultrascale.precision.policy import Policy
from ultrascale.step import micro_batch

BASE: dict[str, Any] = {
    "run.steps": 1,
    "run.seed": 3,
    "model.family": "llama",
    "model.hidden_size": 16,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.intermediate_size": 24,
    "model.vocab_size": 131,
    "model.initializer_range": 0.1,
    "batch.global_size": 4,
    "batch.micro_size": 1,
    "batch.sequence_length": 8,
    "data.train": "builtin:uneven",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "optimizer.max_norm": None,
    "precision.compute": "float64",
}

Box = tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]
"""(logical name, global shape, offset, values)"""


def config_of(overrides: Mapping[str, Any] | None = None, world: int = 1) -> Config:
    """BASE with some dotted keys set otherwise, resolved for a world of this size."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in {**BASE, **(overrides or {})}.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    return resolve(Config.model_validate(tree), world)


def assembled(config: Config, context: Context | None = None) -> Assembly:
    """What this rank of the pool trains with; without a context, what one process does."""
    mesh = Mesh.of(config)
    plan = planned_groups(config, mesh)
    groups = create(mesh, plan, Ledger()) if context is None else context.groups(mesh, plan)
    return assemble(config, mesh, context.rank if context else 0, groups, torch.device("cpu"))


def by_hand(config: Config, rank: int) -> Build:
    """What layers of one rank of a larger mesh are built with, in this process: its groups cannot be used."""
    mesh = Mesh.of(config)

    def group(axes: Sequence[str]) -> Group:
        ranks = mesh.members(rank, axes)
        return Group(mesh.label(axes), ranks, ranks.index(rank), None, Ledger())

    placement = Placement.of(config, mesh)
    experts = ExpertGroups(
        placement,
        placement.holders(mesh, rank),
        travel=group(placement.group_axes(mesh)),
        rows=group(["cp", "tp"]),
        dispatch="all_to_all",
        seed=config.run.seed,
    )
    return Build(
        mesh=mesh,
        rank=rank,
        tensor_group=group(["tp"]),
        sequence_parallel=bool(config.parallel.sequence_parallel) and config.parallel.tp > 1,
        policy=Policy.of(config),
        recompute=config.recompute.mode,
        attention=ContextAttention.of_one_rank(rank, ReferenceAttention()),
        experts=experts if config.model.num_experts else None,
    )


def tokens(config: Config, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels int64 [seq, global batch]; some positions have no target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch.sequence_length, config.batch.global_size)
    inputs = torch.randint(config.model.vocab_size, shape, generator=generator)
    labels = torch.randint(config.model.vocab_size, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = NO_TARGET
    return inputs, labels


def step_batch_of(
    assembly: Assembly, inputs: torch.Tensor, labels: torch.Tensor | None, documents: Sequence[Documents] | None = None
) -> StepBatch:
    """This rank's micro-batches of a global batch; without labels the last stage returns logits.

    documents   of each sequence, where its documents begin; positions do not restart there
    """
    config, mesh, axes = assembly.config, assembly.mesh, ["dp", "ep"]
    share = inputs.shape[1] // mesh.size(axes)
    first, size = share * mesh.index(assembly.rank, axes), config.batch.micro_size
    micro_batches = []
    for start in range(first, first + share, size):
        part = slice(start, start + size)
        arrays = MicroArrays(
            inputs=inputs[:, part].numpy(),
            labels=(inputs if labels is None else labels)[:, part].numpy(),
            positions=np.repeat(np.arange(inputs.shape[0])[:, None], size, axis=1),
            further_labels=(),
            further_inputs=(),
            samples=np.arange(start, start + size),
            documents=None if documents is None else tuple(documents[part]),
            padding=np.zeros(size, np.int64),
        )
        made = micro_batch(assembly, arrays)
        micro_batches.append(made if labels is not None else replace(made, labels=()))
    targets = 0 if labels is None else int((labels != NO_TARGET).sum())
    return StepBatch(micro_batches, {"targets": targets, "rows": inputs.shape[1]})


def boxes(assembly: Assembly, buffer: str) -> list[Box]:
    """Every box of this rank in one kind of flat buffer: gradients, masters or pieces of the weights."""
    store = assembly.store
    return [
        (span.layout.name, span.layout.shape, offset, values.detach().to(torch.float64).numpy().copy())
        for bucket in store.buckets
        for span in bucket.spans
        for offset, values in store.pieces(bucket, span, getattr(bucket, buffer))
    ]


def box_of(store: Store, bucket: Bucket, span: Span, flat: torch.Tensor) -> torch.Tensor:
    """This rank's one box of a span, a view, where nothing is shared out; without elements when it is all padding."""
    pieces = [values for _, values in store.pieces(bucket, span, flat)]
    assert len(pieces) <= 1
    return pieces[0] if pieces else flat[:0]


def whole(held: Sequence[list[Box]]) -> dict[str, np.ndarray]:
    """Logical tensors from the boxes of all ranks; an element that no rank holds stays NaN."""
    tensors: dict[str, np.ndarray] = {}
    for boxes_of_rank in held:
        for name, shape, offset, values in boxes_of_rank:
            tensor = tensors.setdefault(name, np.full(shape, np.nan))
            tensor[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = values
    return tensors
