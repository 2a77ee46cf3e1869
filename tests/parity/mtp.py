"""Parity cells of multi-token prediction: embedding and head used again on the last stage, under every other axis."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import context
import mla
import moe
from cells import Cell

TWO: dict[str, Any] = {"model.num_nextn_predict_layers": 2, "model.num_hidden_layers": 2}
TIED = {"model.tie_word_embeddings": True}
SP, NO_SP = {"parallel.sequence_parallel": True}, {"parallel.sequence_parallel": False}
SELECTIVE, FULL = {"recompute.mode": "selective"}, {"recompute.mode": "full"}
SCHEDULES = ("1f1b", "zb_h1", "zb_v", "dualpipe", "dualpipe_v")
DEEPSEEK: dict[str, Any] = dict(moe.DEEPSEEK)
"""Latent attention, a dense layer and one of experts, and experts in the layers behind; balanced by biases."""


def cell(*parts: dict[str, Any]) -> Cell:
    overrides: dict[str, Any] = {**TWO, "batch.micro_size": 2}
    for part in parts:
        overrides |= part
    world = 1
    for axis in ("dp", "tp", "cp", "pp", "ep"):
        world *= overrides.get(f"parallel.{axis}", 1)
    return Cell(world, overrides)


def tp(form: dict[str, Any]) -> dict[str, Any]:
    return {"parallel.tp": 2, **form}


def pp(schedule: str) -> dict[str, Any]:
    layers = 4 if schedule in ("zb_v", "dualpipe_v") else 2
    return {
        "parallel.pp": 2,
        "pipeline.schedule": schedule,
        "model.num_hidden_layers": layers,
        "batch.micro_size": 1,
    }


def zero(stage: int) -> dict[str, Any]:
    return {"parallel.dp": 2, "parallel.zero_stage": stage, "batch.micro_size": 1}


def cp(method: str) -> dict[str, Any]:
    return {"parallel.cp": 2, "context.method": method}


def cover() -> list[Cell]:
    """What `make test` runs: each other axis, with and without a tied head, once."""
    return [
        cell(FULL),
        cell(tp(SP), TIED),
        cell(tp(NO_SP), SELECTIVE),
        cell(pp("1f1b")),
        cell(pp("zb_v"), TIED, FULL),
        cell(pp("dualpipe")),
        cell(zero(3), TIED),
        cell(zero(2), pp("1f1b")),
        cell(cp("ring"), tp(SP), context.DOCUMENTS),
        cell(cp("ulysses"), context.PADDED, context.SOME_LAYERS),
        cell(DEEPSEEK, {"parallel.ep": 2}, tp(SP)),
        cell(DEEPSEEK, {"parallel.ep": 2}, pp("1f1b"), SELECTIVE),
    ]


def matrix() -> Iterator[Cell]:
    """What `make prove` runs: schedules × tp × ties × recomputation, with cp and ZeRO; and all of DeepSeek-V3."""
    forms: tuple[dict[str, Any], ...] = ({}, tp(SP), tp(NO_SP))
    for form, tie, recompute in product(forms, ({}, TIED), ({}, SELECTIVE, FULL)):
        yield cell(form, tie, recompute)
        for schedule in SCHEDULES:
            yield cell(form, pp(schedule), tie, recompute)
    for stage, tie, schedule in product((1, 2, 3), ({}, TIED), (None, *SCHEDULES)):
        yield cell(tie, pp(schedule) if schedule else {}, zero(stage))
    for method, mask, tie in product(mla.METHODS, context.MASKS.values(), ({}, TIED)):
        yield cell(cp(method), mask, tie)
        yield cell(cp(method), mask, tie, tp(SP))
        yield cell(cp(method), mask, tie, pp("zb_v"), context.PADDED)
    for form, recompute in product(forms, ({}, SELECTIVE, FULL)):
        yield cell(DEEPSEEK, {"parallel.ep": 2}, form, recompute)
        for schedule in SCHEDULES:
            yield cell(DEEPSEEK, {"parallel.ep": 2}, form, recompute, pp(schedule))
    for stage in (1, 2, 3):
        yield cell(DEEPSEEK, {"parallel.ep": 2}, zero(stage))
