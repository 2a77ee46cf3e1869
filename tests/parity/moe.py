"""Parity cells of mixtures of experts: how experts are cut and folded, with every other axis, alone and together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from cells import Cell

SIZES = {
    "model.head_dim": 12,
    "model.num_experts": 8,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 20,
}
TERMS = {"model.router_aux_loss_coef": 0.1, "model.router_z_loss_coef": 0.01}
QWEN3 = {"model.family": "qwen3_moe", **SIZES, **TERMS}
MIXTRAL = {"model.family": "mixtral", **SIZES, **TERMS, "model.num_experts": 4}
DEEPSEEK = {
    "model.family": "deepseek_v3", "model.num_key_value_heads": None, "model.q_lora_rank": 12, "model.kv_lora_rank": 10,
    "model.qk_nope_head_dim": 6, "model.qk_rope_head_dim": 4, "model.v_head_dim": 7, "model.num_experts": 8,
    "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 20, "model.n_shared_experts": 1,
    "model.first_k_dense_replace": 1, "model.scoring_func": "sigmoid", "model.n_group": 4, "model.topk_group": 2,
    "model.router_bias_update_rate": 0.05, **TERMS,
}  # fmt: skip
SHARED = {"model.n_shared_experts": 2}
SOME = {"model.mlp_only_layers": (0,)}
SIGMOID = {
    "model.scoring_func": "sigmoid", "model.routed_scaling_factor": 2.5, "model.n_group": 4, "model.topk_group": 2,
}  # fmt: skip
GATHER = {"parallel.expert_dispatch": "all_gather"}
OF_BATCH = {"model.router_aux_loss_scope": "global_batch"}
DROPS = {"model.expert_capacity_factor": 0.8}
NOISY = {"model.router_jitter_noise": 0.1}
BIASED = {"model.router_bias_update_rate": 0.05}
RAW = {"model.norm_topk_prob": False, "model.num_experts_per_tok": 3}
SP, NO_SP = {"parallel.sequence_parallel": True}, {"parallel.sequence_parallel": False}
FULL, SELECTIVE = {"recompute.mode": "full"}, {"recompute.mode": "selective"}
TIED = {"model.tie_word_embeddings": True}
ONE_ROW = {"batch.micro_size": 1}


def folded(*axes: str, inside: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"parallel.expert_axes": axes, "parallel.expert_tensor_axes": inside}


def cell(model: dict[str, Any], axes: dict[str, int], *more: dict[str, Any]) -> Cell:
    layers = {} if axes.get("pp", 1) > 1 else {"model.num_hidden_layers": 2}
    overrides: dict[str, Any] = {**model, **layers, **{f"parallel.{axis}": size for axis, size in axes.items()}}
    if axes.get("dp", 1) * axes.get("ep", 1) > 4:
        overrides["batch.micro_size"] = 1
    for part in more:
        overrides |= part
    replicas = axes.get("dp", 1) * axes.get("ep", 1)
    if overrides.get("pipeline.schedule") == "dualpipe" and replicas > 2:
        overrides["batch.global_size"] = 4 * replicas  # it needs four micro-batches of each
    world = 1
    for axis in ("dp", "tp", "cp", "pp", "ep"):
        world *= overrides.get(f"parallel.{axis}", 1)
    return Cell(world, overrides)


def cover() -> list[Cell]:
    """What `make test` runs: each way to cut experts, each choice of a router, with each of the other axes."""
    return [
        cell(MIXTRAL, {"ep": 2}, GATHER, SIGMOID, SHARED),
        cell(QWEN3, {"ep": 4}, GATHER, RAW, FULL, BIASED, NOISY),
        cell(QWEN3, {"tp": 2}, GATHER, SP, folded("ep", inside=("tp",)), SHARED, SELECTIVE),
        cell(QWEN3, {"tp": 2, "ep": 2}, NO_SP, folded("ep", "tp"), SHARED, SIGMOID, BIASED, OF_BATCH),
        cell(QWEN3, {"cp": 2, "ep": 2}, folded("ep", "cp"), {"data.document_mask": True}, DROPS),
        cell(MIXTRAL, {"cp": 2, "tp": 2}, GATHER, SP, folded("cp", "tp"), {"context.method": "allgather"}, DROPS),
        cell(QWEN3, {"cp": 2, "tp": 2}, NO_SP, folded("cp", inside=("tp",)), SELECTIVE, RAW, DROPS, NOISY),
        cell(QWEN3, {"dp": 2, "ep": 2}, {"parallel.zero_stage": 3}, SHARED, TIED, OF_BATCH),
        cell(QWEN3, {"pp": 2, "ep": 2}, GATHER, {"pipeline.schedule": "zb_v"}, SOME, OF_BATCH, ONE_ROW),
        cell(QWEN3, {"pp": 2, "ep": 2}, {"pipeline.schedule": "dualpipe"}, FULL, BIASED, ONE_ROW, OF_BATCH, DROPS),
        cell(QWEN3, {"pp": 2, "tp": 2, "ep": 2}, SP, {"pipeline.schedule": "1f1b"}, SIGMOID, SHARED, NOISY),
        cell(MIXTRAL, {"ep": 2}, {"optimizer.name": "muon"}),
        cell(DEEPSEEK, {"tp": 2, "ep": 2}, GATHER, SP, folded("ep"), SELECTIVE),
        cell(DEEPSEEK, {"pp": 2, "ep": 2}, {"pipeline.schedule": "dualpipe_v"}, ONE_ROW),
        cell(QWEN3, {"cp": 2}, BIASED, OF_BATCH, DROPS, NOISY, {"context.pad": True, "batch.sequence_length": 13}),
    ]


def matrix() -> Iterator[Cell]:
    """What `make prove` runs: folds × sequence parallelism × routers × recomputation, with pp, cp, dp and ZeRO."""
    variants = [dict(QWEN3), {**QWEN3, **SHARED, **SIGMOID, **BIASED}, {**MIXTRAL, **RAW, **TIED, **SOME}, DEEPSEEK]
    folds: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"ep": 2}, {}),
        ({"ep": 4}, {}),
        ({"tp": 2}, folded("ep", inside=("tp",))),
        ({"tp": 2}, folded("ep")),
        ({"tp": 2}, folded("tp")),
        ({"cp": 2}, folded("cp")),
        ({"ep": 2, "tp": 2}, folded("ep", inside=("tp",))),
        ({"ep": 2, "tp": 2}, folded("ep")),
        ({"ep": 2, "tp": 2}, folded("ep", "tp")),
        ({"ep": 2, "cp": 2}, folded("ep", "cp")),
        ({"ep": 2, "cp": 2}, folded("ep", inside=("cp",))),
        ({"cp": 2, "tp": 2}, folded("cp", "tp")),
        ({"cp": 2, "tp": 2}, folded("cp", inside=("tp",))),
        ({"dp": 2, "ep": 2}, {}),
        ({"dp": 2, "ep": 2}, folded("dp", "ep")),
    ]
    for model, (axes, fold) in product(variants, folds):
        for sp, recompute in product((SP, NO_SP) if "tp" in axes else ({},), ({}, SELECTIVE, FULL)):
            yield cell(model, axes, fold, sp, recompute)
        for schedule in ("1f1b", "zb_v", "dualpipe"):
            yield cell(model, {**axes, "pp": 2}, fold, {"pipeline.schedule": schedule, "batch.micro_size": 1})
    for axes, fold in folds:
        for further in ((GATHER,), (OF_BATCH, BIASED, DROPS), (GATHER, OF_BATCH, DROPS, NOISY)):
            for sp, recompute in product((SP, NO_SP) if "tp" in axes else ({},), ({}, FULL)):
                yield cell(QWEN3, axes, fold, sp, recompute, *further)
            for schedule in ("1f1b", "zb_v", "dualpipe"):
                yield cell(DEEPSEEK, {**axes, "pp": 2}, fold, {"pipeline.schedule": schedule}, ONE_ROW, *further)
    further_token = {**DEEPSEEK, "model.num_nextn_predict_layers": 1}
    for axes, dispatch in (({"ep": 2, "cp": 2}, GATHER), ({"pp": 2, "ep": 2}, {}), ({"tp": 2, "ep": 2}, GATHER)):
        yield cell(further_token, axes, dispatch, OF_BATCH, DROPS, NOISY, ONE_ROW)
    for stage in (1, 2, 3):
        zero = {"parallel.zero_stage": stage, **ONE_ROW}
        yield cell(QWEN3, {"dp": 2, "ep": 2}, zero, GATHER, OF_BATCH)
        yield cell(QWEN3, {"dp": 2, "cp": 2}, zero, folded("cp"), OF_BATCH, DROPS, NOISY)
    for model, stage in product(variants, (1, 2, 3)):
        zero = {"parallel.zero_stage": stage, "batch.micro_size": 1}
        yield cell(model, {"dp": 2, "ep": 2}, zero)
        yield cell(model, {"dp": 4, "ep": 2}, zero, {"parallel.dp_shard": 2})
        yield cell(model, {"dp": 2, "tp": 2}, zero, folded("tp"))
        yield cell(model, {"dp": 2, "cp": 2}, zero, folded("cp"))
        enough = {"pipeline.schedule": "dualpipe_v", "batch.global_size": 16}
        yield cell(model, {"dp": 2, "ep": 2, "pp": 2}, zero, enough)
    for model in variants:
        for term in ("router_aux_loss_coef", "router_z_loss_coef"):
            other = ({"router_aux_loss_coef", "router_z_loss_coef"} - {term}).pop()
            for axes in ({"ep": 2}, {"tp": 2}, {"cp": 2}, {"ep": 2, "cp": 2}, {"ep": 2, "tp": 2}):
                yield cell(model, axes, {f"model.{other}": 0.0})
