"""Parity cells of context parallelism: every method with every mask, alone and with the other axes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from cells import Cell

TWO_LAYERS = {"model.num_hidden_layers": 2}
"""What is at stake is inside a layer."""
METHODS = ("ring", "allgather", "ulysses", "hybrid")
CAUSAL: dict[str, Any] = {}
WINDOW = {"model.sliding_window": 5}
SOME_LAYERS = {
    "model.sliding_window": 3,
    "model.layer_types": ("sliding_attention", "full_attention"),
}
DOCUMENTS = {"data.document_mask": True, "data.reset_positions": True}
MASKS = {"causal": CAUSAL, "window": WINDOW, "documents": DOCUMENTS, "both": {**WINDOW, **DOCUMENTS}}
TP = {"parallel.tp": 2, "parallel.sequence_parallel": True}
PP = {"parallel.pp": 2, "pipeline.schedule": "1f1b"}
FULL = {"recompute.mode": "full"}
SELECTIVE = {"recompute.mode": "selective"}
TIED = {"model.tie_word_embeddings": True}
CONTIGUOUS = {"context.split": "contiguous"}
EIGHT_HEADS = {"model.num_attention_heads": 8, "model.num_key_value_heads": 4}
PADDED = {"context.pad": True, "batch.sequence_length": 13}


def cell(method: str, cp: int, *more: dict[str, Any]) -> Cell:
    overrides: dict[str, Any] = {"parallel.cp": cp, "context.method": method, "batch.micro_size": 2}
    if method == "hybrid" and cp == 4:
        overrides["context.ulysses_size"] = 2
    for part in more:
        overrides |= part
    if overrides.get("parallel.pp", 1) == 1:
        overrides |= TWO_LAYERS
    world = cp
    for axis in ("dp", "tp", "pp"):
        world *= overrides.get(f"parallel.{axis}", 1)
    return Cell(world, overrides)


def cover() -> list[Cell]:
    """What `make test` runs: each method with each mask, each of the other axes and each choice once."""
    return [
        Cell(1, {**WINDOW, "recompute.mode": "selective"}),
        Cell(1, {**DOCUMENTS, "batch.micro_size": 4, "kernels.attention": "reference"}),
        cell("ring", 4, DOCUMENTS, SELECTIVE),
        cell("ring", 2, TP, DOCUMENTS, {"model.num_key_value_heads": 1}),
        cell("ring", 2, PP, WINDOW, TIED, PADDED),
        cell("ring", 2, {"parallel.dp": 2, "parallel.zero_stage": 3, "batch.micro_size": 1}, DOCUMENTS),
        cell("allgather", 2, TP, PP, CONTIGUOUS, DOCUMENTS),
        cell("allgather", 4, SOME_LAYERS, PADDED, FULL),
        cell("ulysses", 4, DOCUMENTS, {"model.num_key_value_heads": 1}),
        cell("ulysses", 2, PP, FULL, WINDOW, {"pipeline.schedule": "zb_h1"}),
        cell("hybrid", 4, {**WINDOW, **DOCUMENTS}),
        cell("hybrid", 4, CONTIGUOUS, SELECTIVE, {"model.num_key_value_heads": 4}),
        # Ranks that have different messages wait equally often, or what runs beside them is issued in another order.
        cell(
            "ring",
            4,
            {"parallel.pp": 2, "pipeline.schedule": "dualpipe_v", "batch.micro_size": 1},
            CONTIGUOUS,
            DOCUMENTS,
        ),
        cell("ring", 2, TP, PP, DOCUMENTS, {"parallel.order": ("cp", "tp", "pp", "ep", "dp")}),
    ]


def matrix() -> Iterator[Cell]:
    """What `make prove` runs: method × cp × mask × recomputation, with tp, pp, both, ZeRO, splits, padding."""
    for method, (_, mask), recompute in product(METHODS, MASKS.items(), ({}, SELECTIVE, FULL)):
        yield cell(method, 2, mask, recompute)
        yield cell(method, 4, mask, recompute)
        yield cell(method, 2, TP, mask, recompute)
        yield cell(method, 2, PP, mask, recompute, TIED)
        yield cell(method, 2, TP, PP, mask, recompute)
    for method, (_, mask) in product(METHODS, MASKS.items()):
        yield cell(method, 4, TP, EIGHT_HEADS, mask)
        yield cell(method, 4, PP, mask, TIED)
        yield cell(method, 4, mask, {"model.num_key_value_heads": 1})
        yield cell(method, 4, mask, {"model.num_key_value_heads": 4}, SOME_LAYERS)
        yield cell(method, 4, mask, PADDED)
        yield cell(method, 2, TP, mask, PADDED, {"parallel.sequence_parallel": False})
        for stage in (1, 2, 3):
            yield cell(method, 2, {"parallel.dp": 2, "parallel.zero_stage": stage, "batch.micro_size": 1}, mask)
        for schedule in ("zb_v", "dualpipe", "dualpipe_v", "interleaved_1f1b_a2a_overlap"):
            yield cell(method, 2, {"parallel.pp": 2, "pipeline.schedule": schedule}, mask)
        for schedule in ("dualpipe", "dualpipe_v", "interleaved_1f1b_a2a_overlap"):
            pairs = {"parallel.pp": 2, "pipeline.schedule": schedule, "batch.micro_size": 1}
            yield cell(method, 4, pairs, mask, {} if method == "ulysses" else CONTIGUOUS)
        if method != "ulysses":
            yield cell(method, 4, mask, CONTIGUOUS)
            yield cell(method, 4, mask, CONTIGUOUS, PADDED, FULL)
