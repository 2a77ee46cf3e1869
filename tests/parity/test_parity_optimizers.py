"""Optimizers that see whole matrices, and groups with settings of their own, come to one process's weights.

Adam divides by the root of the second moment, and Newton-Schulz by the norm of a whole matrix: neither is linear in the
gradient, so a matrix of which a part is missing, or a moment that is another's, gives another weight. With a large eps
no step of an element hangs on the last bits of a gradient that is nearly zero.
"""

from __future__ import annotations

from typing import Any

import pytest
from cells import Cell, check

from ultrascale.config.schema import ParameterGroup

ADAMW = {"optimizer.name": "adamw", "optimizer.eps": 1e-3}
MUON = {"optimizer.name": "muon", "optimizer.eps": 1e-3}
TIED = {"model.tie_word_embeddings": True}
GROUPS = {
    "optimizer.groups": (
        ParameterGroup(match="layers.*.attention.k_proj.*", optimizer="muon", lr_scale=0.5, momentum=0.8),
        ParameterGroup(match="layers.1.*", optimizer="sgd", weight_decay=0.1),
        ParameterGroup(kind="norm", lr_scale=2.0, weight_decay=0.2),
        ParameterGroup(kind="embedding", betas=(0.5, 0.9), lr_scale=0.1),
    )
}
"""Every algorithm, one of them on one member of a fused tensor."""
EMBEDDING = {"optimizer.groups": (ParameterGroup(kind="embedding", optimizer="muon"),)}


def zero(stage: int, **sizes: int) -> dict[str, Any]:
    return {**{f"parallel.{axis}": size for axis, size in sizes.items()}, "parallel.zero_stage": stage}


CELLS = {
    "muon, zero 0, dp 2": Cell(2, {**MUON, **zero(0, dp=2)}),
    "muon, zero 1, dp 2": Cell(2, {**MUON, **zero(1, dp=2)}),
    "muon, zero 3, dp 2": Cell(2, {**MUON, **zero(3, dp=2), "batch.micro_size": 4}),
    "muon, zero 1, dp 2 × 2": Cell(4, {**MUON, **zero(1, dp=4), "parallel.dp_shard": 2}),
    "muon, tp 2": Cell(2, {**MUON, "parallel.tp": 2}),
    "muon, tp 4, KV heads replicated": Cell(4, {**MUON, "parallel.tp": 4, "optimizer.max_norm": 0.5}),
    "muon, pp 2, tied": Cell(2, {**MUON, **TIED, "parallel.pp": 2}),
    "muon for a tied embedding, pp 2": Cell(2, {**MUON, **TIED, **EMBEDDING, "parallel.pp": 2}),
    "muon, two copies": Cell(2, {**MUON, **TIED, "parallel.pp": 2, "pipeline.schedule": "dualpipe"}),
    "muon, zero 3, dp 2, tp 2": Cell(4, {**MUON, **zero(3, dp=2, tp=2)}),
    "adamw, zero 1, dp 2": Cell(2, {**ADAMW, **zero(1, dp=2)}),
    "adamw, zero 3, dp 2": Cell(2, {**ADAMW, **zero(3, dp=2)}),
    "groups, zero 1, dp 2, tied": Cell(2, {**ADAMW, **GROUPS, **TIED, **zero(1, dp=2)}),
    "groups, zero 3, dp 2, tp 2": Cell(4, {**ADAMW, **GROUPS, **zero(3, dp=2, tp=2)}),
}


@pytest.mark.parametrize("name", CELLS)
def test_optimizer_equals_one_process(name: str) -> None:
    check(CELLS[name])
