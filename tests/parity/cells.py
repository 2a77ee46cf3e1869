"""Parity cells: the same model, data and seed under a layout and in one process, in float64 with plain SGD.

A cell runs the product's own `train_step` on its ranks. From every rank come back the losses and norms of three
steps, every gradient after reduction (step 1) and every weight (step 3), as boxes of logical tensors. The comparison
puts them together, demands that replicas are bitwise equal, and measures the largest relative difference from one
process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import faults
import numpy as np
import torch

from pool import Context, pool
from ultrascale.assembly import Assembly, assemble, planned_groups
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config
from ultrascale.data.loader import Data
from ultrascale.mesh.axes import Mesh
from ultrascale.step import step_batch, train_step

TOLERANCE = 1e-9
"""Largest relative difference: float64 leaves 1e-16 per operation, and a wrong factor is at least 1e-3."""
STEPS = 3

BASE: dict[str, Any] = {
    "run": {"steps": STEPS, "seed": 7},
    "model": {
        "family": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 131,
        # A large deviation, so that no gradient is lost beside another.
        "initializer_range": 0.1,
        "label_smoothing": 0.1,
        "z_loss_coefficient": 0.01,
    },
    "batch": {"global_size": 8, "micro_size": 2, "sequence_length": 16},
    "data": {"train": "builtin:uneven"},
    "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.01, "max_norm": None},
    "precision": {"compute": "float64"},
    # Several buckets a stage, some of several units.
    "parallel": {"bucket_bytes": 60_000},
}

Box = tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]
"""(logical name, global shape, offset, values)"""


@dataclass(frozen=True)
class Cell:
    """One layout, by its dotted overrides of BASE."""

    world: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(f"{key.split('.')[-1]}={value}" for key, value in self.overrides.items()) or "one process"

    def config(self) -> Config:
        tree = {section: dict(values) for section, values in BASE.items()}
        for key, value in self.overrides.items():
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = value
        return resolve(Config.model_validate(tree), self.world)

    def reference(self) -> Cell:
        """The same computation in one process, row by row: what only says how the work is cut is left out."""
        kept = {
            k: v
            for k, v in self.overrides.items()
            if k.split(".")[0] in ("model", "data", "optimizer") or k in ("batch.global_size", "batch.sequence_length")
        }
        return Cell(1, {**kept, "batch.micro_size": 1})


@dataclass
class Outcome:
    """What one rank saw."""

    reports: list[dict[str, float]]
    norms: list[float]
    gradients: list[Box]
    weights: list[Box]
    untouched: list[str]


def boxes(assembly: Assembly, buffer: str) -> list[Box]:
    """Every box of this rank in one kind of flat buffer: gradients or masters."""
    found = []
    for bucket in assembly.store.buckets:
        for span in bucket.spans:
            for offset, values in assembly.store.pieces(bucket, span, getattr(bucket, buffer)):
                found.append((span.layout.name, span.layout.shape, offset, values.detach().clone().numpy()))
    if buffer == "masters":  # what a run keeps beside its parameters comes out alike too
        for kept in assembly.store.kept:
            offset, _ = kept.layout.box(assembly.mesh, assembly.rank)
            found.append((kept.layout.name, kept.layout.shape, offset, kept.tensor.clone().numpy()))
    return found


def train(config: Config, assembly: Assembly) -> Outcome:
    """Three steps."""
    data = Data(config)
    mesh, axes = assembly.mesh, ["dp", "ep"]
    outcome = Outcome([], [], [], [], [])
    for step in range(1, STEPS + 1):
        arrays = data.batch(step, mesh.index(assembly.rank, axes), mesh.size(axes), config.batch.micro_size)
        result = train_step(assembly, step_batch(assembly, arrays), step)
        outcome.reports.append(dict(result.report))
        outcome.norms.append(result.grad_norm)
        if step == 1:
            outcome.gradients = boxes(assembly, "gradients")
    outcome.weights = boxes(assembly, "masters")
    outcome.untouched = assembly.gradients.untouched()
    return outcome


def run_rank(context: Context, cell: Cell, fault: str | None = None) -> Outcome:
    """What a worker of the pool does."""
    config = cell.config()
    mesh = Mesh.of(config)
    with faults.seeded(fault):
        groups = context.groups(mesh, planned_groups(config, mesh))
        return train(config, assemble(config, mesh, context.rank, groups, torch.device("cpu")))


def alone(cell: Cell) -> Outcome:
    """The cell in this process, without torch.distributed."""
    config = cell.config()
    mesh = Mesh.of(config)
    groups = create(mesh, planned_groups(config, mesh), Ledger())
    return train(config, assemble(config, mesh, 0, groups, torch.device("cpu")))


@cache
def _reference(overrides: tuple[tuple[str, Any], ...]) -> Outcome:
    return alone(Cell(1, dict(overrides)))


def one_process(cell: Cell) -> Outcome:
    """The reference of a cell, computed once per model and data."""
    return _reference(tuple(sorted(cell.reference().overrides.items())))


def run(cell: Cell, fault: str | None = None) -> list[Outcome]:
    """The cell on its ranks."""
    if cell.world == 1:
        with faults.seeded(fault):
            return [alone(cell)]
    return pool(cell.world).run(run_rank, cell, fault)


class ParityError(AssertionError):
    """A layout does not equal one process."""


def whole(outcomes: list[Outcome], kind: str) -> dict[str, np.ndarray]:
    """Logical tensors put together from all ranks' boxes; copies must be bitwise equal, and nothing may be missing."""
    tensors: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for rank, outcome in enumerate(outcomes):
        for name, shape, offset, values in getattr(outcome, kind):
            tensor = tensors.setdefault(name, np.zeros(shape))
            there = filled.setdefault(name, np.zeros(shape, dtype=bool))
            part = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            copied = there[part]
            if not np.array_equal(tensor[part][copied], values[copied]):
                raise ParityError(f"{kind} of {name}: the copy on rank {rank} differs from another rank's")
            tensor[part] = values
            there[part] = True
    for name, there in filled.items():
        if not there.all():
            raise ParityError(f"{kind} of {name}: {int((~there).sum())} elements are on no rank")
    return tensors


def differences(cell: Cell, outcomes: list[Outcome]) -> Iterator[tuple[str, float]]:
    """(what, relative difference from one process), gradients first: they name the parameter that went wrong."""
    reference = one_process(cell)
    for kind in ("gradients", "weights"):
        expected = whole([reference], kind)
        found = whole(outcomes, kind)
        if expected.keys() != found.keys():
            raise ParityError(f"parameters differ: {sorted(expected.keys() ^ found.keys())}")
        for name, values in expected.items():
            scale = np.abs(values).max()
            error = np.abs(values - found[name]).max()
            yield f"{kind} of {name}", float(error / scale) if scale else float(error)
    for rank, outcome in enumerate(outcomes):
        for step, (report, norm) in enumerate(zip(outcome.reports, outcome.norms, strict=True)):
            for name, value in reference.reports[step].items():
                yield f"{name} of step {step + 1} on rank {rank}", abs(report[name] - value) / abs(value)
            yield (
                f"norm of step {step + 1} on rank {rank}",
                abs(norm - reference.norms[step]) / reference.norms[step],
            )


def check(cell: Cell, fault: str | None = None) -> float:
    """Runs the cell; returns its largest difference, or raises ParityError that names what is off."""
    outcomes = run(cell, fault)
    for outcome in outcomes:
        if outcome.untouched:
            raise ParityError(f"{cell}: no gradient ever reached {', '.join(outcome.untouched)}")
    worst = 0.0
    for what, error in differences(cell, outcomes):
        if not error <= TOLERANCE:
            raise ParityError(f"{cell}: {what} is off by {error:.3g} (relative)")
        worst = max(worst, error)
    return worst
