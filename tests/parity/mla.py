"""Parity cells of multi-head latent attention: latents that tp replicates, heads that it cuts, and every other axis."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import context
from cells import Cell

SP, NO_SP = {"parallel.sequence_parallel": True}, {"parallel.sequence_parallel": False}
LATENT: dict[str, Any] = {
    "model.family": "deepseek_v3",
    "model.num_key_value_heads": None,
    "model.q_lora_rank": 12,
    "model.kv_lora_rank": 10,
    "model.qk_nope_head_dim": 6,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 7,
    # What is at stake is inside a layer: two are enough where a pipeline does not ask for more.
    "model.num_hidden_layers": 2,
    "batch.micro_size": 4,
}
STRAIGHT = {"model.q_lora_rank": None}
"""Queries without a latent."""
WIDE_VALUES = {"model.v_head_dim": 14}
"""Wider than the heads of queries and keys."""
SELECTIVE, FULL = {"recompute.mode": "selective"}, {"recompute.mode": "full"}
ZERO3 = {"parallel.dp": 2, "parallel.zero_stage": 3, "batch.micro_size": 2}
METHODS = ("ring", "allgather", "ulysses")


def cell(*parts: dict[str, Any]) -> Cell:
    overrides = dict(LATENT)
    for part in parts:
        overrides |= part
    world = 1
    for axis in ("dp", "tp", "cp", "pp"):
        world *= overrides.get(f"parallel.{axis}", 1)
    return Cell(world, overrides)


def tp(size: int, form: dict[str, Any]) -> dict[str, Any]:
    return {"parallel.tp": size, **form}


def pp(schedule: str) -> dict[str, Any]:
    return {
        "parallel.pp": 2,
        "pipeline.schedule": schedule,
        "model.num_hidden_layers": 4,
        "batch.micro_size": 2,
    }


def cp(method: str) -> dict[str, Any]:
    return {"parallel.cp": 2, "context.method": method}


def cover() -> list[Cell]:
    """What `make test` runs: each form of tp, each other axis and each choice once."""
    return [
        cell(SELECTIVE),
        cell(tp(2, SP), FULL),
        cell(tp(2, NO_SP), SELECTIVE),
        cell(tp(4, SP), SELECTIVE, STRAIGHT),
        cell(tp(4, NO_SP), WIDE_VALUES),
        cell(pp("1f1b"), context.TIED),
        cell(tp(2, SP), pp("zb_v"), SELECTIVE, context.TIED),
        cell(cp("ring"), tp(2, SP), context.DOCUMENTS),
        cell(cp("allgather")),
        cell(cp("ulysses"), FULL),
        cell(ZERO3, tp(2, SP)),
    ]


def matrix() -> Iterator[Cell]:
    """What `make prove` runs: tp with and without sequence parallelism × recomputation × latents, with the others."""
    forms: list[dict[str, Any]] = [{}, *(tp(size, form) for size, form in product((2, 4), (SP, NO_SP)))]
    small = [form for form in forms if form.get("parallel.tp", 1) <= 2]
    for form, recompute, latent in product(forms, ({}, SELECTIVE, FULL), ({}, STRAIGHT, WIDE_VALUES)):
        yield cell(form, recompute, latent)
    for form, recompute in product(small, ({}, SELECTIVE, FULL)):
        for schedule in ("1f1b", "zb_h1", "zb_v", "dualpipe_v"):
            yield cell(form, recompute, pp(schedule), context.TIED)
        for method, (_, mask) in product(METHODS, context.MASKS.items()):
            yield cell(form, recompute, cp(method), mask)
        for stage in (1, 2, 3):
            yield cell(form, recompute, {**ZERO3, "parallel.zero_stage": stage})
    for method in METHODS:
        yield cell(cp(method), tp(2, SP), pp("zb_v"), SELECTIVE)
