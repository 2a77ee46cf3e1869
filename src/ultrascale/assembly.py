"""From a config to everything that trains: the order in which things are built, on one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from ultrascale.comm.collectives import gather_json
from ultrascale.comm.process_groups import Groups
from ultrascale.config.schema import Config
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import GroupSpec, group_plan
from ultrascale.models.family import Family, StageModule, load_family
from ultrascale.optim.optimizer import Optimizer, make_optimizer
from ultrascale.parallel.gradients import Gradients
from ultrascale.parallel.module import Build
from ultrascale.parallel.objective import Objective
from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.engine import Engine
from ultrascale.pipeline.layer_costs import split_of
from ultrascale.pipeline.partition import Split
from ultrascale.pipeline.program import evaluation_program, micro_batches, program
from ultrascale.precision.policy import Policy


def training_plan(config: Config) -> Plan:
    """The validated list of actions of every pp coordinate."""
    pipeline = config.pipeline
    return program(
        pipeline.schedule,
        config.parallel.pp,
        micro_batches(config),
        pipeline.virtual_stages,
        group_size=pipeline.group_size,
        activation_limit=pipeline.activation_limit,
    )


def evaluation_plan(training: Plan) -> Plan:
    """Forward only, over the same stages in the same places."""
    return evaluation_program(training)


def parameter_holders(config: Config, plan: Plan) -> dict[int | str, tuple[int, ...]]:
    """Stage, or tie → the pp coordinates that hold its parameters."""
    holders: dict[int | str, tuple[int, ...]] = {
        stage: tuple(sorted(ranks)) for stage, ranks in enumerate(plan.placement)
    }
    if config.model.tie_word_embeddings:
        holders["word_embeddings"] = tuple(sorted({*plan.placement[0], *plan.placement[-1]}))
    return holders


def planned_groups(config: Config, mesh: Mesh) -> tuple[GroupSpec, ...]:
    """The communication groups of this config, which all ranks make at start."""
    copies = parameter_holders(config, training_plan(config)).values()
    return group_plan(mesh, dict.fromkeys(ranks for ranks in copies if len(ranks) > 1))


@dataclass(frozen=True)
class Assembly:
    """What one rank trains with."""

    config: Config
    mesh: Mesh
    rank: int
    device: torch.device
    policy: Policy
    groups: Groups
    family: Family
    objective: Objective
    split: Split
    plan: Plan
    stages: Mapping[int, StageModule]
    gradients: Gradients
    optimizer: Optimizer
    engine: Engine
    evaluation: Engine


def make_build(config: Config, mesh: Mesh, rank: int, groups: Groups) -> Build:
    """What layers of this rank are built with."""
    return Build(
        mesh=mesh,
        rank=rank,
        tensor_group=groups.of(["tp"]),
        sequence_parallel=bool(config.parallel.sequence_parallel) and config.parallel.tp > 1,
        policy=Policy.of(config),
        recompute=config.recompute.mode,
    )


def assemble(config: Config, mesh: Mesh, rank: int, groups: Groups, device: torch.device) -> Assembly:
    """Builds this rank's share of the run: stages on the meta device, then buckets that give them memory."""
    family = load_family(config.model.family)(config)
    objective = Objective(family.terms())
    build = make_build(config, mesh, rank, groups)

    plan = training_plan(config)
    split = split_of(config, plan)
    coordinate = mesh.index(rank, ["pp"])
    stages = {
        stage: family.stage(build, split[stage].layers, split[stage].embedding, split[stage].head)
        for stage in plan.stages_of(coordinate)
    }

    holders = parameter_holders(config, plan)
    gradients = Gradients(
        {stage: module.units() for stage, module in stages.items()},
        mesh,
        rank,
        build.policy,
        group_of=groups.of,
        copies_of=lambda held: groups.of((), pipeline=holders[held]),
        bucket_bytes=config.parallel.bucket_bytes,
        deterministic=_deterministic(config, device),
    )
    gradients.materialise(device, config.run.seed)
    optimizer = make_optimizer(config, gradients)

    def buffer(sequences: int) -> torch.Tensor:
        tokens = config.batch.sequence_length // config.parallel.cp
        if build.sequence_parallel:
            tokens //= config.parallel.tp
        shape = (tokens, sequences, config.model.hidden_size)
        return torch.empty(shape, dtype=build.policy.compute, device=device)

    pipeline = groups.of(["pp"])
    engine = Engine(plan, stages, pipeline, objective, gradients, buffer)
    evaluation = Engine(evaluation_plan(plan), stages, pipeline, objective, None, buffer)
    return Assembly(
        config, mesh, rank, device, build.policy, groups, family, objective, split, plan, stages, gradients,
        optimizer, engine, evaluation,
    )  # fmt: skip


class BuildError(Exception):
    """What was built is not the model that was configured."""


def check_build(assembly: Assembly) -> int:
    """The model's parameter count, after comparing what all ranks built with the closed form; collective.

    Raises BuildError when elements or layers were lost or built twice, which an integer division can do silently.
    """
    gradients, mesh, rank = assembly.gradients, assembly.mesh, assembly.rank
    held = sum(
        prod(span.layout.box(mesh, rank)[1])
        for bucket in gradients.buckets
        for span in bucket.spans
        if gradients.counts(bucket, span)
    )
    layers = [layer for stage in assembly.split for layer in stage.layers]
    configured = assembly.config.model.num_hidden_layers
    if layers != list(range(configured)):
        raise BuildError(f"the stages hold layers {layers}, not each of the {configured} configured ones once")
    total = sum(gather_json(held, assembly.groups.world))
    expected = assembly.family.sizes().parameters
    if total != expected:
        raise BuildError(f"{total:,} parameters were built; the closed form of the model says {expected:,}")
    return total


def check_gradients(assembly: Assembly) -> None:
    """After a step every parameter has had a gradient; collective. Raises BuildError that names those that had none."""
    lost = gather_json(assembly.gradients.untouched(), assembly.groups.world)
    if names := sorted({name for part in lost for name in part}):
        raise BuildError(f"no gradient reached {', '.join(names)}: the model does not use what it declares")


def check_finite(assembly: Assembly) -> None:
    """Masters are finite, or nothing is saved over a healthy checkpoint; collective. Raises BuildError with names."""
    bad = [
        span.layout.name
        for bucket in assembly.gradients.buckets
        for span in bucket.spans
        if not bool(bucket.masters[span.start : span.stop].isfinite().all())
    ]
    if names := sorted({name for part in gather_json(bad, assembly.groups.world) for name in part}):
        raise BuildError(f"{', '.join(names[:8])} hold values that are not finite: nothing is saved of them")


def _deterministic(config: Config, device: torch.device) -> bool:
    choice = config.parallel.deterministic_reduction
    return device.type == "cpu" if choice == "auto" else bool(choice)
