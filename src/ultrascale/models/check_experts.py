"""What a config can get wrong about its experts. Needs no torch."""

from __future__ import annotations

from ultrascale.config.model_section import Model
from ultrascale.config.problem import Problem, choices
from ultrascale.config.schema import Config
from ultrascale.models.family import FAMILIES

WITH_EXPERTS = {"mixtral": True, "qwen3_moe": True, "deepseek_v3": False}
"""Family → whether it must have experts."""

NEEDED = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
FURTHER = (
    "n_shared_experts", "norm_topk_prob", "scoring_func", "routed_scaling_factor", "n_group", "topk_group",
    "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "router_bias_update_rate",
    "router_aux_loss_coef", "router_aux_loss_scope", "router_z_loss_coef",
    "router_jitter_noise", "expert_capacity_factor",
)  # fmt: skip


def check(config: Config) -> list[Problem]:
    """Problems of the keys about experts. Takes a resolved config."""
    model = config.model
    if model.family not in WITH_EXPERTS or (model.num_experts is None and not WITH_EXPERTS[model.family]):
        return _idle(config) if model.family in FAMILIES else []
    missing = [name for name in NEEDED if getattr(model, name) is None]
    if missing:
        message = f"model.{missing[0]} is missing: model.family={model.family} has experts; set it"
        return [Problem(f"model.{missing[0]}", message)]
    return [*(_choice(model) or _cut(config)), *_without_effect(config)]


def _idle(config: Config) -> list[Problem]:
    """Keys that say something of experts that are not there."""
    defaults = {name: Model.model_fields[name].default for name in (*NEEDED, *FURTHER)}
    keys = [f"model.{name}" for name, default in defaults.items() if getattr(config.model, name) != default]
    keys += ["parallel.expert_axes", "parallel.expert_tensor_axes"]
    if config.parallel.ep > 1:
        keys.append("parallel.ep")
    if config.parallel.expert_dispatch != "auto":
        keys.append("parallel.expert_dispatch")
    if config.precision.combine != "wide":
        keys.append("precision.combine")
    family = config.model.family
    why = "while model.num_experts is not set" if family in WITH_EXPERTS else "which has no experts"
    return [
        Problem(key, f"{key} has no effect under model.family={family}, {why}; leave it out", kind="idle")
        for key in keys
    ]


def _without_effect(config: Config) -> list[Problem]:
    """Keys that another key leaves nothing to say."""
    model, precision = config.model, config.precision
    experts, k, factor = model.num_experts or 0, model.num_experts_per_tok or 0, model.expert_capacity_factor
    scope: str = model.router_aux_loss_scope
    idle: list[tuple[str, str, str]] = []
    if scope != "sequence" and not model.router_aux_loss_coef:
        idle.append(("model.router_aux_loss_scope", scope, "while model.router_aux_loss_coef is 0; set it"))
    if factor is not None and factor * k >= experts:
        why = f"as an expert then has room for all tokens ({experts} experts, {k} of a token); use less than"
        idle.append(("model.expert_capacity_factor", f"{factor:g}", f"{why} {experts / k:g}"))
    if precision.combine == "compute" and precision.compute in ("float32", "float64"):
        why = f"under precision.compute={precision.compute}, which is as wide; use precision.compute=bfloat16"
        idle.append(("precision.combine", precision.combine, why))
    return [
        Problem(key, f"{key}={value} has no effect {why}, or leave it out", kind="idle") for key, value, why in idle
    ]


def _choice(model: Model) -> list[Problem]:
    """A token can choose as many experts as it must."""
    experts, k, groups = model.num_experts or 0, model.num_experts_per_tok or 0, model.n_group
    if experts % groups:
        fitting = choices([n for n in range(1, experts + 1) if experts % n == 0])
        return [
            Problem("model.n_group", f"model.n_group={groups} does not divide num_experts={experts}; use {fitting}")
        ]
    if model.topk_group > groups:
        message = f"model.topk_group={model.topk_group} is more than model.n_group={groups}; use at most {groups}"
        return [Problem("model.topk_group", message)]
    allowed = experts // groups * model.topk_group
    if k > allowed:
        message = f"model.num_experts_per_tok={k} is more than the {allowed} experts that a token may choose from"
        return [Problem("model.num_experts_per_tok", f"{message}; use at most {allowed}")]
    return []


def _cut(config: Config) -> list[Problem]:
    """Experts, and what is inside of one, are cut evenly, over axes of their own."""
    parallel, model = config.parallel, config.model
    assert model.num_experts is not None
    assert model.moe_intermediate_size is not None
    assert parallel.expert_tensor_axes is not None
    for key, axes in (("expert_axes", parallel.expert_axes), ("expert_tensor_axes", parallel.expert_tensor_axes)):
        if "pp" in axes:
            message = f"parallel.{key}=[{', '.join(axes)}]: the layers of a stage are whole; use dp, ep, cp or tp"
            return [Problem(f"parallel.{key}", message)]
    if both := sorted({*parallel.expert_axes} & {*parallel.expert_tensor_axes}):
        message = f"parallel.expert_tensor_axes names {both[0]}, over which parallel.expert_axes cuts already"
        return [Problem("parallel.expert_tensor_axes", f"{message}; leave it out")]
    if parallel.ep > 1 and "ep" not in {*parallel.expert_axes, *parallel.expert_tensor_axes}:
        message = f"parallel.ep={parallel.ep} cuts no experts when parallel.expert_axes leaves ep out; use parallel.dp"
        return [Problem("parallel.ep", message)]
    checks = (
        ("expert_axes", parallel.expert_axes, "num_experts", model.num_experts),
        ("expert_tensor_axes", parallel.expert_tensor_axes, "moe_intermediate_size", model.moe_intermediate_size),
    )
    for key, axes, name, size in checks:
        ranks = 1
        for axis in axes:
            ranks *= getattr(parallel, axis) or 1
        if size % ranks:
            message = f"parallel.{key}=[{', '.join(axes)}] are {ranks} ranks, which do not divide model.{name}={size}"
            fitting = choices([n for n in range(1, size + 1) if size % n == 0])
            return [Problem(f"parallel.{key}", f"{message}; use axes of {fitting} ranks together")]
    return []
