"""Pairs of layouts: what the one saved the other loads, bit for bit, and goes on from as if nothing had been.

One side trains two steps and saves, by the product's own `Snapshots`; the other restores under its layout. Parameters,
masters, moments and biases of routers are put together from all ranks of both and compared bit by bit, copies too; then
three more steps equal those of one process that was never interrupted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import TOLERANCE, Cell
from moe import DEEPSEEK, folded

from pool import Context, pool
from ultrascale.assembly import Assembly, assemble, planned_groups
from ultrascale.checkpoint.folder import folder_name
from ultrascale.checkpoint.snapshots import Snapshots
from ultrascale.checkpoint.state import state_boxes
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.data.loader import Data
from ultrascale.mesh.axes import Mesh
from ultrascale.step import step_batch, train_step

BEFORE, AFTER = 2, 3
"""Steps that one side makes before it saves, and the other after it has loaded."""

ADAMW = {"optimizer.name": "adamw", "optimizer.lr": 0.01, "optimizer.max_norm": 1.0, "optimizer.weight_decay": 0.1}
# An odd vocabulary, which tensor parallelism pads; two KV heads, which four ranks hold twice.
DENSE = {**ADAMW, "model.vocab_size": 131, "model.num_key_value_heads": 2}
TIED = {**DENSE, "model.tie_word_embeddings": True}
MIXTURE = {**ADAMW, **DEEPSEEK}
NARROW = {**MIXTURE, "precision.compute": "bfloat16"}


def axes(**sizes: Any) -> dict[str, Any]:
    return {f"parallel.{name}": value for name, value in sizes.items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp=2": axes(tp=2),
    "tp=4, KV heads twice": axes(tp=4, sequence_parallel=False),
    "dp=4 zero 3": axes(dp=4, zero_stage=3),
    "pp=4, layers 0 3 1 0": {**axes(pp=4), "pipeline.layout": (0, 3, 1, 0)},
    "dp=2 tp=2 zero 1": axes(dp=2, tp=2, zero_stage=1),
    "cp=2 dp=2 zero 2": axes(cp=2, dp=2, zero_stage=2),
    "cp=2 tp=2": axes(cp=2, tp=2),
    "pp=2 dp=2, zb_v, zero 1": {**axes(pp=2, dp=2, zero_stage=1), "pipeline.schedule": "zb_v"},
    "dp=8 zero 2": axes(dp=8, zero_stage=2),
    "dp=4, two hosts, zero 1": axes(dp=4, dp_shard=2, zero_stage=1),
    "pp=2 tp=2 dp=2, interleaved, zero 2": {
        **axes(pp=2, tp=2, dp=2, zero_stage=2), "pipeline.schedule": "interleaved_1f1b", "pipeline.virtual_stages": 2,
    },
    "pp=2 cp=2 tp=2": axes(pp=2, cp=2, tp=2),
}  # fmt: skip
MIXTURE_LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ep=2": axes(ep=2),
    "tp=2, experts over tp": {**axes(tp=2), **folded("ep", "tp")},
    "tp=2, experts cut inside": {**axes(tp=2), **folded("ep", inside=("tp",))},
    "cp=2 ep=2, experts over both, zero 1": {**axes(cp=2, ep=2, zero_stage=1), **folded("ep", "cp")},
    "dp=2 ep=2 zero 3": axes(dp=2, ep=2, zero_stage=3),
    "pp=2 ep=2 tp=2 zero 2": {**axes(pp=2, ep=2, tp=2, zero_stage=2), **folded("ep", inside=("tp",))},
    "dp=2 ep=4 zero 1": axes(dp=2, ep=4, zero_stage=1),
}


@dataclass(frozen=True)
class Pair:
    """A model, the layout that saves, and the one that loads."""

    model: str
    saved: str
    loaded: str

    def __str__(self) -> str:
        return f"{self.model}: {self.saved} → {self.loaded}"


MODELS = {"dense": DENSE, "tied": TIED, "mixture": MIXTURE, "mixture, bfloat16": NARROW}


def layouts_of(model: str) -> Mapping[str, Mapping[str, Any]]:
    return MIXTURE_LAYOUTS if model.startswith("mixture") else LAYOUTS


def cell(model: str, layout: str) -> Cell:
    overrides = {**MODELS[model], **layouts_of(model)[layout]}
    world = 1
    for axis in ("dp", "tp", "cp", "pp", "ep"):
        world *= overrides.get(f"parallel.{axis}", 1)
    if overrides.get("parallel.dp", 1) * overrides.get("parallel.ep", 1) > 4:
        overrides["batch.micro_size"] = 1
    return Cell(world, overrides)


def _pairs(model: str, steps: tuple[int, ...]) -> Iterator[Pair]:
    """Each layout to those so many places behind it, in a ring: every one saves and loads equally often."""
    names = list(layouts_of(model))
    for step in steps:
        for place, name in enumerate(names):
            yield Pair(model, name, names[(place + step) % len(names)])


MATRIX = [
    *_pairs("dense", (1, 4)),
    *_pairs("tied", (11,)),
    *_pairs("mixture", (1, 3)),
    *_pairs("mixture, bfloat16", (2,)),
]
SAMPLE = [
    Pair("dense", "tp=4, KV heads twice", "dp=4 zero 3"),
    Pair("tied", "cp=2 dp=2 zero 2", "pp=4, layers 0 3 1 0"),
    Pair("mixture", "cp=2 ep=2, experts over both, zero 1", "tp=2, experts cut inside"),
    Pair("mixture, bfloat16", "dp=2 ep=2 zero 3", "one process"),
]
"""What `make test` runs."""


@dataclass
class Seen:
    """What one rank saw: boxes of its state before and after its steps, and what it reported."""

    before: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]
    after: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]
    rounded: bool
    """Whether the copies in the compute dtype were the masters, rounded."""
    reports: list[dict[str, float]]


def state_of(assembly: Assembly) -> list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]:
    return [
        (box.name, box.shape, box.offset, box.tensor.detach().double().numpy().copy())
        for box in state_boxes(assembly.optimizer, owned=False)
    ]


def rounded(assembly: Assembly) -> bool:
    assembly.optimizer.weights.settle()
    return all(torch.equal(b.piece, b.masters.to(b.piece.dtype)) for b in assembly.store.buckets)


def go(context: Context | None, cell: Cell, root: str, restore: bool, steps: tuple[int, int]) -> Seen:
    """One rank: restores or begins, makes the steps after the first up to the second, and saves when it began."""
    config = cell.config()
    mesh, data = Mesh.of(config), Data(config)
    plan = planned_groups(config, mesh)
    groups = create(mesh, plan, Ledger()) if context is None else context.groups(mesh, plan)
    assembly = assemble(config, mesh, context.rank if context else 0, groups, torch.device("cpu"))
    header = {
        "config": config.model_dump(mode="json"), "axes": dict(mesh.sizes), "ties": {}, "data": data.fingerprint(),
    }  # fmt: skip
    snapshots = Snapshots(assembly.optimizer, Path(root), header, groups.world, None, "full")
    if restore:
        manifest = snapshots.restore(Path(root) / folder_name(steps[0]))
        assert manifest.step == steps[0]
    seen = Seen(state_of(assembly), [], rounded(assembly), [])
    replica = ["dp", "ep"]
    for step in range(steps[0] + 1, steps[1] + 1):
        arrays = data.batch(step, mesh.index(assembly.rank, replica), mesh.size(replica), config.batch.micro_size)
        result = train_step(assembly, step_batch(assembly, arrays), step)
        seen.reports.append({**result.report, "grad_norm": result.grad_norm})
    seen.after = state_of(assembly)
    if not restore:
        snapshots.save(steps[1], data.position(steps[1]))
    return seen


def ranks(cell: Cell, root: Path, restore: bool, steps: tuple[int, int]) -> list[Seen]:
    arguments = (cell, str(root), restore, steps)
    return [go(None, *arguments)] if cell.world == 1 else pool(cell.world).run(go, *arguments)


class ReshardError(AssertionError):
    """What was loaded is not what was saved, or another run followed."""


def joined(seen: list[Seen], kind: str) -> dict[str, np.ndarray]:
    """Logical tensors from all ranks' boxes; copies must be equal bit by bit, and nothing may be missing."""
    tensors: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for rank, one in enumerate(seen):
        for name, shape, offset, values in getattr(one, kind):
            tensor, there = tensors.setdefault(name, np.zeros(shape)), filled.setdefault(name, np.zeros(shape, bool))
            part = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            copied = there[part]
            if not np.array_equal(tensor[part][copied].view(np.uint64), values[copied].view(np.uint64)):
                raise ReshardError(f"{name}: the copy on rank {rank} differs from another rank's")
            tensor[part], there[part] = values, True
    for name, there in filled.items():
        if not there.all():
            raise ReshardError(f"{name}: {int((~there).sum())} elements are on no rank")
    return tensors


_FOLDER = tempfile.TemporaryDirectory(prefix="reshard-matrix-")


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=_FOLDER.name))


@cache
def saved(model: str, layout: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint of step 2 under a layout, and the state that it was made of."""
    root = new_folder()
    return root, joined(ranks(cell(model, layout), root, False, (0, BEFORE)), "after")


@cache
def uninterrupted(model: str) -> Seen:
    """One process over all steps."""
    (seen,) = ranks(cell(model, "one process"), new_folder(), False, (0, BEFORE + AFTER))
    return seen


def same_bits(pair: Pair, expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    if expected.keys() != found.keys():
        raise ReshardError(f"{pair}: tensors differ: {sorted(expected.keys() ^ found.keys())}")
    for name, values in expected.items():
        differing = int((values.view(np.uint64) != found[name].view(np.uint64)).sum())
        if differing:
            raise ReshardError(f"{pair}: {differing} elements of {name} are not those that were saved")


def check(pair: Pair) -> dict[str, Any]:
    """Runs the pair; returns how many tensors were equal, and the largest relative difference of the steps after."""
    root, expected = saved(pair.model, pair.saved)
    steps = (BEFORE, BEFORE + AFTER)
    seen = ranks(cell(pair.model, pair.loaded), root, True, steps)
    same_bits(pair, expected, joined(seen, "before"))
    if not all(one.rounded for one in seen):
        raise ReshardError(f"{pair}: weights are not the masters in the compute dtype")
    moments = [name for name in expected if name.startswith("optimizer.exp_avg_sq/")]
    if not moments or not any(np.abs(expected[name]).max() > 0 for name in moments):
        raise ReshardError(f"{pair}: nothing was trained")
    found = {"tensors": len(expected), "moments": sum("/" in name for name in expected)}
    if cell(pair.model, pair.loaded).config().precision.compute != "float64":
        return {**found, "worst": None}
    return {**found, "worst": max(error for _, error in _after(pair, seen))}


def _after(pair: Pair, seen: list[Seen]) -> Iterator[tuple[str, float]]:
    """(what, relative difference from the run that was not interrupted) of the steps after."""
    reference = uninterrupted(pair.model)
    expected, found = joined([reference], "after"), joined(seen, "after")
    pairs = [(name, np.abs(values).max(), np.abs(values - found[name]).max()) for name, values in expected.items()]
    for rank, one in enumerate(seen):
        for step, (report, wanted) in enumerate(zip(one.reports, reference.reports[BEFORE:], strict=True), BEFORE + 1):
            pairs += [
                (f"{key} of step {step} on rank {rank}", abs(value), abs(value - report[key]))
                for key, value in wanted.items()
            ]
    for what, scale, error in pairs:
        relative = float(error / scale) if scale else float(error)
        if not relative <= TOLERANCE:
            raise ReshardError(f"{pair}: {what} is off by {relative:.3g} (relative)")
        yield what, relative
