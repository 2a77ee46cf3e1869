"""Parity cells of every training schedule that the registry knows: by itself, and with the other axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cells import Cell

from ultrascale.pipeline.schedules.registry import SCHEDULES, Schedule

TIED = {"model.tie_word_embeddings": True}
FULL = {"recompute.mode": "full"}


def training() -> list[Schedule]:
    """Everything that trains; a schedule that is added is covered without a word here."""
    return [entry for entry in SCHEDULES if entry.training]


def uneven(stages: int, layers: int) -> tuple[int, ...]:
    """A split with an empty first stage and the rest heaped towards the end."""
    counts = [0] * stages
    for layer in range(layers):
        counts[-1 - (layer * layer) // layers % max(1, stages - 1)] += 1
    return tuple(counts)


def cell(entry: Schedule, pp: int, *more: dict[str, Any], split: bool = False, dp: int = 1, tp: int = 1) -> Cell:
    """The schedule on pp stages, with micro-batches enough for the most demanding one (DualPipe: 2P)."""
    stages = pp * entry.virtual_stages
    layers = max(4, stages)
    overrides: dict[str, Any] = {
        "parallel.pp": pp,
        "pipeline.schedule": entry.name,
        "model.num_hidden_layers": layers,
        "batch.global_size": max(8, 2 * pp) * dp,
        # Among tensor ranks a micro-batch costs dozens of collectives: as few as DualPipe allows.
        "batch.micro_size": 2 if tp > 1 else 1,
    }
    if split:
        overrides["pipeline.layout"] = uneven(stages, layers)
    if dp > 1:
        overrides["parallel.dp"] = dp
    if tp > 1:
        overrides["parallel.tp"] = tp
    for part in more:
        overrides |= part
    return Cell(pp * dp * tp, overrides)


def cover() -> list[Cell]:
    """Each schedule by itself and with one other axis, variants in turn: what `make test` runs."""
    found = []
    for number, entry in enumerate(training()):
        tied, untied = ({}, TIED) if number % 2 else (TIED, {})
        found.append(cell(entry, 2 if number % 3 else 4, tied, FULL if number % 4 == 1 else {}, split=number % 2 == 0))
        if number % 2:
            found.append(cell(entry, 2, untied, {"parallel.sequence_parallel": number % 4 == 1}, tp=2))
        else:
            found.append(cell(entry, 2, untied, {"recompute.mode": "selective"}, dp=2))
    return found


def matrix() -> Iterator[Cell]:
    """The whole family: what `make prove` runs."""
    for entry in training():
        for pp in (2, 4, 8):
            for tied in ({}, TIED):
                for recompute in ({}, FULL):
                    for split in (False, True) if pp < 8 else (tied == TIED,):
                        yield cell(entry, pp, tied, recompute, split=split)
        for tied in ({}, TIED):
            yield cell(entry, 2, tied, {"parallel.sequence_parallel": True}, tp=2)
            yield cell(entry, 2, tied, {"parallel.sequence_parallel": False}, FULL, tp=2, split=True)
            yield cell(entry, 2, tied, {"recompute.mode": "selective"}, dp=2)
            yield cell(entry, 2, tied, {"parallel.sequence_parallel": True}, tp=2, dp=2, split=True)
            yield cell(entry, 4, tied, {"batch.micro_size": 2, "batch.global_size": 16}, split=True)
