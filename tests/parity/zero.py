"""Parity cells of the ZeRO stages: alone, with the other axes, with schedules, ties, recomputation, odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cells import Cell

TIED = {"model.tie_word_embeddings": True}
FULL = {"recompute.mode": "full"}
ODD = {"model.vocab_size": 101, "model.intermediate_size": 36}
"""Neither the vocabulary nor a block divides by the shards; norms are smaller than a shard's alignment."""


def cell(stage: int, world: int, *more: dict[str, Any]) -> Cell:
    overrides: dict[str, Any] = {"parallel.zero_stage": stage}
    for part in more:
        overrides |= part
    return Cell(world, overrides)


def _dp(size: int) -> dict[str, Any]:
    return {"parallel.dp": size, "batch.micro_size": 1}


def _pp(schedule: str) -> dict[str, Any]:
    return {"parallel.pp": 2, "pipeline.schedule": schedule}


TP = {"parallel.tp": 2, "parallel.sequence_parallel": True}
HYBRID = {"parallel.dp_shard": 2}
KEPT = {"parallel.keep_gathered": True}


def cover() -> list[Cell]:
    """What `make test` runs: each stage with each of the others once."""
    return [
        cell(1, 2, _dp(2), TIED),
        cell(2, 2, _dp(2), ODD),
        cell(3, 2, _dp(2), FULL, TIED),
        cell(3, 2, _dp(2), {"parallel.prefetch": 3, "parallel.deterministic_reduction": False}),
        cell(3, 2, _dp(2), {"parallel.prefetch": 0, "parallel.overlap": False, "recompute.mode": "selective"}),
        cell(1, 4, _dp(4), HYBRID, ODD),
        cell(2, 4, _dp(4), TIED, FULL),
        cell(3, 4, _dp(4), HYBRID, TIED, ODD),
        cell(1, 4, _dp(2), TP),
        cell(3, 4, _dp(2), TP, TIED),
        cell(1, 4, _dp(2), _pp("1f1b"), TIED),
        cell(2, 4, _dp(2), _pp("1f1b"), FULL, {"pipeline.layout": (3, 1)}),
        cell(3, 4, _dp(2), _pp("zb_v"), TIED),
        cell(3, 4, _dp(2), _pp("dualpipe"), TIED),
        cell(2, 4, _dp(2), _pp("dualpipe_v")),
        cell(3, 4, _dp(2), _pp("interleaved_1f1b"), KEPT),
    ]


def matrix() -> Iterator[Cell]:
    """What `make prove` runs: stages 0–3 × dp 2, 4 × tp × pp × recompute × micro-batches 1, several × ties × sizes."""
    for stage in (0, 1, 2, 3):
        for dp in (2, 4):
            for tied in ({}, TIED):
                for recompute in ({}, FULL):
                    for micro in (1, 8 // dp):
                        yield cell(
                            stage, dp, _dp(dp), {"batch.micro_size": micro}, tied, recompute, ODD if tied else {}
                        )
        for tied in ({}, TIED):
            for recompute in ({}, FULL):
                yield cell(stage, 4, _dp(2), TP, tied, recompute, ODD)
                for schedule in ("1f1b", "zb_h1", "zb_v", "dualpipe", "dualpipe_v", "interleaved_1f1b_a2a_overlap"):
                    yield cell(stage, 4, _dp(2), _pp(schedule), tied, recompute)
                yield cell(stage, 8, _dp(2), TP, _pp("1f1b"), tied, recompute)
                yield cell(stage, 8, _dp(4), _pp("1f1b"), HYBRID, tied, recompute)
            if stage:
                yield cell(stage, 4, _dp(4), HYBRID, tied)
        if stage == 3:
            for kept in ({}, KEPT):
                for prefetch in (0, 2):
                    yield cell(3, 4, _dp(2), _pp("zb_v"), kept, {"parallel.prefetch": prefetch})
