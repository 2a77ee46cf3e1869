"""From a config to everything that trains: the order in which things are built, on one page."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ultrascale.comm.collectives import gather_json
from ultrascale.comm.group import Group
from ultrascale.comm.process_groups import Groups
from ultrascale.config.schema import Config
from ultrascale.kernels.choice import attention_backend
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import GroupSpec, group_plan
from ultrascale.models.family import Family, StageModule, load_family
from ultrascale.models.sizes import all_layers, is_sparse, tied_on
from ultrascale.optim.groups import uses
from ultrascale.optim.optimizer import Optimizer, make_optimizer
from ultrascale.parallel.bucket_size import bucket_bytes
from ultrascale.parallel.context.attention import ContextAttention
from ultrascale.parallel.context.split import Cut, padded_length
from ultrascale.parallel.experts.choice import expert_dispatch
from ultrascale.parallel.experts.dispatch import ExpertGroups
from ultrascale.parallel.experts.load import ExpertLoad
from ultrascale.parallel.experts.placement import Placement
from ultrascale.parallel.gradients import Gradients
from ultrascale.parallel.layout import BATCH_AXES, Layout
from ultrascale.parallel.module import Build, stored_tensors
from ultrascale.parallel.objective import Objective
from ultrascale.parallel.shards import Sharding
from ultrascale.parallel.store import Store
from ultrascale.parallel.weights import Weights
from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.engine import Engine
from ultrascale.pipeline.layer_costs import planned_costs, split_of
from ultrascale.pipeline.partition import Split
from ultrascale.pipeline.program import evaluation_program, micro_batches, program
from ultrascale.pipeline.schedules import registry
from ultrascale.precision.policy import Policy


def training_plan(config: Config) -> Plan:
    """The validated list of actions of every pp coordinate."""
    pipeline = config.pipeline
    return program(
        pipeline.schedule,
        config.parallel.pp,
        micro_batches(config),
        pipeline.virtual_stages,
        planned_costs(config, registry.find(pipeline.schedule)),
        group_size=pipeline.group_size,
        activation_limit=pipeline.activation_limit,
        zero_stage=config.parallel.zero_stage,
        gathered_once=config.parallel.keep_gathered,
    )


def parameter_holders(config: Config, plan: Plan) -> dict[int | str, tuple[int, ...]]:
    """Stage, or tie → the pp coordinates that hold its parameters."""
    holders: dict[int | str, tuple[int, ...]] = {
        stage: tuple(sorted(ranks)) for stage, ranks in enumerate(plan.placement)
    }
    for tie, stages in tied_on(config.model).items():
        holders[tie] = tuple(sorted({rank for stage in stages for rank in plan.placement[stage]}))
    return holders


def planned_groups(config: Config, mesh: Mesh) -> tuple[GroupSpec, ...]:
    """The communication groups of this config, which all ranks make at start."""
    copies = parameter_holders(config, training_plan(config)).values()
    several = dict.fromkeys(ranks for ranks in copies if len(ranks) > 1)
    experts = Placement.of(config, mesh).group_axes(mesh) if config.model.num_experts else None
    return group_plan(mesh, several, whole_matrices=uses(config.optimizer, "muon"), experts=experts)


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
    store: Store
    gradients: Gradients
    optimizer: Optimizer
    engine: Engine
    evaluation: Engine
    load: ExpertLoad | None
    """None: the model has no experts."""


def make_build(config: Config, mesh: Mesh, rank: int, groups: Groups, device: torch.device) -> Build:
    """What layers of this rank are built with."""
    return Build(
        mesh=mesh,
        rank=rank,
        tensor_group=groups.of(["tp"]),
        sequence_parallel=bool(config.parallel.sequence_parallel) and config.parallel.tp > 1,
        policy=Policy.of(config),
        recompute=config.recompute.mode,
        experts=_expert_groups(config, mesh, rank, groups, device) if config.model.num_experts else None,
        attention=ContextAttention.of(
            Cut.of(config),
            gathers=config.context.method == "allgather",
            ring=groups.of(["cp_ring"]),
            ulysses=groups.of(["cp_ulysses"]),
            backend=attention_backend(config, device),
        ),
    )


def _expert_groups(config: Config, mesh: Mesh, rank: int, groups: Groups, device: torch.device) -> ExpertGroups:
    placement = Placement.of(config, mesh)
    return ExpertGroups(
        placement,
        placement.holders(mesh, rank),
        travel=groups.of(placement.group_axes(mesh)),
        rows=groups.of(["cp", "tp"]),
        dispatch=expert_dispatch(config, device.type),
        seed=config.run.seed,
    )


def _expert_load(config: Config, device: torch.device) -> ExpertLoad:
    model = config.model
    assert model.num_experts is not None
    layers = [layer for layer in all_layers(model) if is_sparse(model, layer)]
    return ExpertLoad(layers, model.num_experts, device)


def logical_parameters(config: Config, family: Family, build: Build) -> list[Layout]:
    """The layouts of the whole model, on the meta device: what no rank holds all of under pp."""
    whole = family.stage(build, range(config.model.num_hidden_layers), True, True)
    return [layout for entry in stored_tensors(whole.units()) for layout in entry.stored.members]


def make_stages(family: Family, build: Build, plan: Plan, split: Split) -> dict[int, StageModule]:
    """The stages of this rank, on the meta device."""
    return {
        stage: family.stage(build, split[stage].layers, split[stage].embedding, split[stage].head)
        for stage in plan.stages_of(build.mesh.index(build.rank, ["pp"]))
    }


def make_store(
    config: Config,
    family: Family,
    build: Build,
    plan: Plan,
    stages: Mapping[int, StageModule],
    groups: Groups,
    device_type: str,
) -> Store:
    """What of the stages' parameters is this rank's, and where; without memory yet."""
    holders = parameter_holders(config, plan)
    return Store(
        {stage: module.units() for stage, module in stages.items()},
        build.mesh,
        build.rank,
        build.policy,
        Sharding.on(build.mesh, config.parallel.zero_stage, BATCH_AXES),
        group_of=groups.of,
        copies_of=lambda held: groups.of((), pipeline=holders[held]),
        bucket_bytes=bucket_bytes(config, build.mesh, family.sizes().parameters, device_type),
    )


def assemble(config: Config, mesh: Mesh, rank: int, groups: Groups, device: torch.device) -> Assembly:
    """Builds this rank's share of the run: stages on the meta device, then buckets that give them memory."""
    family = load_family(config.model.family)(config)
    objective = Objective(family.terms())
    build = make_build(config, mesh, rank, groups, device)

    plan = training_plan(config)
    split = split_of(config, plan)
    stages = make_stages(family, build, plan, split)
    store = make_store(config, family, build, plan, stages, groups, device.type)
    store.materialise(device, config.run.seed)
    weights = Weights(store, config.parallel.prefetch, config.parallel.overlap)
    weights.publish()
    gradients = Gradients(store, _deterministic(config, device), config.parallel.overlap)
    layouts = logical_parameters(config, family, build) if config.optimizer.groups else ()
    optimizer = make_optimizer(config, weights, layouts)

    def buffer(sequences: int) -> torch.Tensor:
        tokens = padded_length(config) // config.parallel.cp
        if build.sequence_parallel:
            tokens //= config.parallel.tp
        shape = (tokens, sequences, config.model.hidden_size)
        return torch.empty(shape, dtype=build.policy.compute, device=device)

    pipeline = groups.of(["pp"])
    gathers = weights if store.sharding.stage else None
    load = _expert_load(config, device) if config.model.num_experts else None
    engine = Engine(plan, stages, pipeline, objective, gradients, gathers, buffer, load)
    evaluation = Engine(evaluation_program(plan), stages, pipeline, objective, None, gathers, buffer)
    return Assembly(
        config, mesh, rank, device, build.policy, groups, family, objective, split, plan, stages, store, gradients,
        optimizer, engine, evaluation, load,
    )  # fmt: skip


class PlanError(Exception):
    """Ranks would run different plans."""


def check_plan(config: Config, world: Group) -> None:
    """Compares the plans of all ranks; collective. Raises PlanError: ranks that run two wait for each other for ever.

    A plan may come from a file, which another host has in another version.
    """
    plan = training_plan(config)
    text = repr(plan.placement) + "\n".join(" ".join(map(str, actions)) for actions in plan.actions)
    mine = hashlib.sha256(text.encode()).hexdigest()
    for rank, other in enumerate(gather_json(mine, world)):
        if other != mine:
            raise PlanError(
                f"pipeline.schedule={config.pipeline.schedule} is another plan on rank {rank} than on rank "
                f"{world.ranks[world.index]}; give all hosts the same file, and the same version of ultrascale"
            )


class BuildError(Exception):
    """What was built is not the model that was configured."""


def check_build(assembly: Assembly) -> int:
    """The model's parameter count, after comparing what all ranks built with the closed form; collective.

    Raises BuildError when elements or layers were lost or built twice, which an integer division can do silently.
    """
    store = assembly.store
    held = sum(
        values.numel()
        for bucket in store.buckets
        for span in bucket.spans
        if store.counts(bucket, span)
        for _, values in store.pieces(bucket, span, bucket.masters)
    )
    layers = [layer for stage in assembly.split for layer in stage.layers]
    configured = assembly.config.model.num_hidden_layers
    if layers != list(range(configured)):
        raise BuildError(f"the stages hold layers {layers}, not each of the {configured} configured ones once")
    total = sum(gather_json(held, assembly.groups.world))
    sizes = assembly.family.sizes()
    expected = sizes.parameters + sizes.mtp_parameters
    if total != expected:
        raise BuildError(f"{total:,} parameters were built; the closed form of the model says {expected:,}")
    return total


def check_gradients(assembly: Assembly) -> None:
    """After a step every parameter has had a gradient; collective. Raises BuildError that names those that had none."""
    lost = gather_json(assembly.gradients.untouched(), assembly.groups.world)
    if names := sorted({name for part in lost for name in part}):
        raise BuildError(f"no gradient reached {', '.join(names)}: the model does not use what it declares")


def _deterministic(config: Config, device: torch.device) -> bool:
    choice = config.parallel.deterministic_reduction
    return device.type == "cpu" if choice == "auto" else bool(choice)
