"""The tiny Llama of the trials, and a few steps of it under a layout with everything that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pool import Context, pool
from small import assembled, boxes, config_of, step_batch_of, whole
from ultrascale.parallel.cross_entropy import NO_TARGET
from ultrascale.step import train_step, with_denominators

TINY: dict[str, Any] = {
    "model.hidden_size": 64,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.intermediate_size": 128,
    "model.vocab_size": 256,
    "model.initializer_range": 0.05,
    "batch.global_size": 8,
    "batch.micro_size": 2,
    "batch.sequence_length": 64,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "optimizer.weight_decay": 0.0,
    "optimizer.max_norm": None,
    "precision.compute": "float64",
}
TOLERANCE = 1e-9
"""float64: each operation leaves 1e-16, and what went wrong elsewhere was a factor, or a part that was missing."""

Tokens = tuple[torch.Tensor, torch.Tensor]
"""Inputs and labels, int64 [seq, global batch]."""


@dataclass
class Outcome:
    """What one rank saw of some steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    """Boxes, of the first step."""
    weights: list[Any] = field(default_factory=list)
    """Boxes, after the last."""
    layers: list[int] = field(default_factory=list)
    """Of this rank's stages."""


def text(kept: Sequence[int], length: int = 64, vocabulary: int = 256, seed: int = 0) -> Tokens:
    """Random tokens; sequence i has its first `kept[i]` targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = (length, len(kept))
    inputs = torch.randint(vocabulary, shape, generator=generator)
    labels = torch.randint(vocabulary, shape, generator=generator)
    for column, count in enumerate(kept):
        labels[count:, column] = NO_TARGET
    return inputs, labels


def on_this_rank(
    context: Context | None,
    overrides: Mapping[str, Any],
    batches: Sequence[Tokens],
    documents: Sequence[tuple[int, ...]] | None = None,
) -> Outcome:
    config = config_of({**TINY, **overrides}, context.world_size if context else 1)
    assembly = assembled(config, context)
    outcome = Outcome(layers=[n for stage in assembly.stages for n in assembly.split[stage].layers])
    for number, (inputs, labels) in enumerate(batches, 1):
        batch = with_denominators(assembly, step_batch_of(assembly, inputs, labels, documents).micro_batches)
        result = train_step(assembly, batch, number)
        outcome.losses.append(result.report["loss"])
        outcome.norms.append(result.grad_norm)
        outcome.rates.append(result.lr)
        if number == 1:
            outcome.gradients = boxes(assembly, "gradients")
    outcome.weights = boxes(assembly, "masters")
    return outcome


def steps(
    world: int,
    overrides: Mapping[str, Any],
    batches: Sequence[Tokens],
    documents: Sequence[tuple[int, ...]] | None = None,
) -> list[Outcome]:
    """A step for each batch, on `world` ranks; `documents` says of each sequence where its documents begin."""
    if world == 1:
        return [on_this_rank(None, overrides, batches, documents)]
    return pool(world).run(on_this_rank, dict(overrides), list(batches), documents)


def compare(expected: list[Outcome], found: list[Outcome], tolerance: float = TOLERANCE) -> None:
    """Losses and norms of all steps, gradients of the first, weights after the last; copies bit for bit."""
    for outcome in found:
        np.testing.assert_allclose(outcome.losses, expected[0].losses, rtol=tolerance, err_msg="losses")
        np.testing.assert_allclose(outcome.norms, expected[0].norms, rtol=tolerance, err_msg="norms")
    for kind in ("gradients", "weights"):
        copies_are_equal(found, kind)
        before, now = (whole([getattr(o, kind) for o in outcomes]) for outcomes in (expected, found))
        assert before.keys() == now.keys()
        for name, values in before.items():
            error = np.abs(values - now[name]).max()
            assert error <= tolerance * np.abs(values).max(), f"{kind} of {name}: off by {error:.3g}"


def copies_are_equal(found: list[Outcome], kind: str) -> int:
    """Boxes that several ranks hold are bitwise equal; returns how many there are."""
    held: dict[tuple[str, tuple[int, ...]], bytes] = {}
    copies = 0
    for rank, outcome in enumerate(found):
        for name, _, offset, values in getattr(outcome, kind):
            copies += (name, offset) in held
            data = held.setdefault((name, offset), values.tobytes())
            assert data == values.tobytes(), f"{kind} of {name}: rank {rank} holds another copy"
    return copies
