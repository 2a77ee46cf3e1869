"""Cuts a checkpoint's files as a layout reads them. Any layout loads any checkpoint anyway; afterwards each rank finds
what it reads in one file of its own.

Target written beside its place → source and target read: the source's checksums hold, and each value of each logical
tensor is the source's, whatever the cuts → renamed. Tensors stream in blocks, so memory is what the caller allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ultrascale.assembly import make_build, make_stages, make_store, planned_groups, training_plan
from ultrascale.checkpoint.boxes import CheckpointError, Dims
from ultrascale.checkpoint.commit import begin, commit, ignore, joined_manifest
from ultrascale.checkpoint.folder import temporary_name
from ultrascale.checkpoint.manifest import Manifest, read_manifest
from ultrascale.checkpoint.rewrite import (
    Count,
    Piece,
    Progress,
    as_written,
    box_piece,
    cleared,
    compare_stored,
    refuse_to_overwrite,
    write_files,
)
from ultrascale.checkpoint.stored import Stored, stored_tensors
from ultrascale.checkpoint.workers import Workers
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import Groups
from ultrascale.config import collect
from ultrascale.config.load import Loaded
from ultrascale.config.problem import ConfigError
from ultrascale.config.resolve import resolve, smallest_world
from ultrascale.config.schema import Config, Kernels, Pipeline
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import spec_members
from ultrascale.models.family import FamilyError, load_family
from ultrascale.pipeline.actions import ScheduleError
from ultrascale.pipeline.layer_costs import split_of

Boxes = dict[str, list[tuple[Dims, Dims]]]
"""Logical parameter → boxes (offset, shape)."""

_SECTIONS = ("parallel", "pipeline", "model", "context")
"""Of a config, those whose problems are the layout's. How a batch is divided is for the run to say."""


@dataclass(frozen=True)
class Layout:
    """For whom files are cut.

    dp_shard         as parallel.dp_shard
    expert_axes      as parallel.expert_axes; None: the checkpoint's own folds
    expert_tensor_axes   as parallel.expert_tensor_axes; None: as they follow from expert_axes
    schedule         as pipeline.schedule; None: the checkpoint's own where pp is the same, else the default
    virtual_stages   as pipeline.virtual_stages
    device           where the run will be: buckets, which ZeRO cuts, have another size on GPUs
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: int = 0
    dp_shard: int | None = None
    expert_axes: tuple[str, ...] | None = None
    expert_tensor_axes: tuple[str, ...] | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Resharded:
    """What was written."""

    path: str
    axes: dict[str, int]
    zero_stage: int
    tensors: int
    files: int
    bytes: int
    verified: bool


def reshard(
    source: Path, target: Path, layout: Layout, workers: Workers, progress: Progress | None = None
) -> Resharded:
    """Writes `source` again as `target`, cut for `layout`; one process's layout is one file.

    Raises CheckpointError when the source is damaged, the target is there already, the layout does not fit the model,
    or what was written is not what was read; then nothing is left.
    """
    refuse_to_overwrite(target)
    manifest = read_manifest(source)
    stored = stored_tensors(source, manifest)
    config = target_config(manifest, layout)
    files = file_plan(config, stored, layout.device)
    header = {
        **manifest.header,
        "config": config.model_dump(mode="json"),
        "axes": dict(Mesh.of(config).sizes),
        "order": list(config.parallel.order),
    }
    total = sum(tensor.bytes for tensor in stored.values())
    count = Count(2 * total, progress)
    temporary = temporary_name(target)
    with cleared(temporary):
        begin(target, temporary, header)
        written = as_written(files, write_files(temporary, stored, files, workers, count), stored)
        again = stored_tensors(temporary, joined_manifest(temporary, header, written))
        compare_stored(stored, again, target, workers, count)
        size = commit(target, temporary, header, written, ignore)
    sizes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "cp", "pp", "ep")}
    return Resharded(str(target), sizes, layout.zero_stage, len(stored), len(files), size, True)


def target_config(manifest: Manifest, layout: Layout) -> Config:
    """The checkpoint's resolved config under the layout; raises CheckpointError saying why it does not fit."""
    config = Config.model_validate(manifest.header["config"], strict=False)
    axes: dict[str, Any] = {axis: getattr(layout, axis) for axis in ("dp", "tp", "cp", "pp", "ep")}
    changed = {**axes, "zero_stage": layout.zero_stage, "dp_shard": layout.dp_shard, "sequence_parallel": "auto"}
    if layout.expert_axes is not None:
        changed |= {"expert_axes": layout.expert_axes, "expert_tensor_axes": None}
    if layout.expert_tensor_axes is not None:
        changed["expert_tensor_axes"] = layout.expert_tensor_axes
    parallel = config.parallel.model_copy(update=changed)
    pipeline = config.pipeline if layout.pp == config.parallel.pp else Pipeline()
    if layout.schedule is not None:
        pipeline = Pipeline(schedule=layout.schedule)
    if layout.virtual_stages is not None:
        pipeline = pipeline.model_copy(update={"virtual_stages": layout.virtual_stages})
    config = config.model_copy(update={"parallel": parallel, "pipeline": pipeline})
    world = smallest_world(config)
    try:
        return collect.check(Loaded(config, Path("layout"), {}), world)
    except ConfigError as error:
        problems = [problem.message for problem in error.problems if problem.key.split(".")[0] in _SECTIONS]
        if problems:
            raise CheckpointError("; ".join(problems)) from error
    return resolve(config, world)


def file_plan(config: Config, stored: Stored, device: str = "cpu") -> Mapping[str, list[Piece]]:
    """File → the pieces that its rank reads and owns; what no layer knows lies whole with rank 0.

    One process has whole tensors, whatever the model is.
    """
    world = smallest_world(config)
    plan: dict[str, list[Piece]] = {}
    known: set[str] = set()
    for rank in range(world) if world > 1 else ():
        for name, boxes in owned_boxes(config, rank, device).items():
            for tensor in _with_state(name, stored):
                known.add(tensor)
                plan.setdefault(_file(rank), []).extend(
                    box_piece(tensor, stored[tensor], offset, shape) for offset, shape in boxes
                )
    for name in stored:
        if name not in known:
            shape = stored[name].shape
            plan.setdefault(_file(0), []).append(box_piece(name, stored[name], (0,) * len(shape), shape))
    return plan


def _with_state(name: str, stored: Stored) -> list[str]:
    """The parameter and its optimizer state, which is cut like it."""
    states = {tensor.split("/", 1)[0] for tensor in stored if "/" in tensor}
    names = [name, *(f"{state}/{name}" for state in sorted(states))]
    return [tensor for tensor in names if tensor in stored]


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def owned_boxes(config: Config, rank: int, device: str) -> Boxes:
    """What one rank of a resolved config saves, from the program that would run there: built on the meta device."""
    mesh = Mesh.of(config)
    ledger = Ledger()
    made: dict[Any, Group | None] = {}
    for spec in planned_groups(config, mesh):
        ranks = spec_members(mesh, spec, rank)
        made[spec] = Group(mesh.label(spec.axes), ranks, ranks.index(rank), None, ledger) if ranks else None
    groups = Groups(mesh, rank, made, ledger)
    try:
        family = load_family(config.model.family)(config)
        plan = training_plan(config)
    except (FamilyError, ScheduleError) as error:
        raise CheckpointError(str(error)) from error
    here = config.model_copy(update={"kernels": Kernels()})  # nothing is computed
    build = make_build(here, mesh, rank, groups, torch.device("cpu"))
    store = make_store(
        config, family, build, plan, make_stages(family, build, plan, split_of(config, plan)), groups, device
    )
    boxes: Boxes = {}
    for bucket in store.buckets:
        for span in bucket.spans:
            if store.counts(bucket, span):
                held = [(box.offset, box.shape) for box in bucket.held(span, mesh, rank)]
                boxes.setdefault(span.layout.name, []).extend(held)
    for kept in store.kept:
        if store.counts_kept(kept):
            boxes.setdefault(kept.layout.name, []).append(kept.layout.box(mesh, rank))
    return boxes
