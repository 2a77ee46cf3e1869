"""Priorities of operations from a building block: one micro-batch's way through the pipeline, repeated.

Qi et al. 2024, arXiv 2405.15362, section 3: a schedule is a block of one micro-batch's operations, started
again every period; how long an activation lives in the block, over the period, is how many a rank holds. A block
is here the time of each operation of micro-batch 0; operation m of the same kind and stage comes m periods later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ultrascale.pipeline.search.operations import FORWARD, INPUT, WEIGHT, Operations

LATER = 1.0e9
"""Periods by which a weight gradient's key lies behind all others: it runs where a rank would stand."""


@dataclass(frozen=True)
class Block:
    """When each (kind, stage) of one micro-batch runs, and after which time the next micro-batch does the same."""

    times: Mapping[tuple[int, int], float]
    period: float


def stretched(operations: Operations, forward: Sequence[float], backward: Sequence[float]) -> Block:
    """A block whose stages follow one another at `stretch` times their own length.

    forward, backward  stage → stretch of its F and of its BI (of B where backwards are not split)
    """
    block: dict[tuple[int, int], float] = {}
    now = 0.0
    for stage in range(operations.stages):
        operation = operations.number(FORWARD, stage, 0)
        now += operations.lag[operation]
        block[FORWARD, stage] = now
        now += operations.duration[operation] * forward[stage]
    for stage in reversed(range(operations.stages)):
        operation = operations.number(INPUT, stage, 0)
        now += operations.lag[operation]
        block[INPUT, stage] = now
        now += operations.duration[operation] * backward[stage]
    return Block(block, max(operations.work()) / operations.micro_batches)


def shares(operations: Operations, block: Block, limits: Sequence[int]) -> list[int]:
    """Stage → activations it may hold: the rank's limit, divided as its activations live in the block.

    At least 1 each; what rounding leaves goes to the stages that came off worst.
    """
    result = [1] * operations.stages
    for rank, held in enumerate(operations.held):
        lives = {stage: max(block.times[INPUT, stage] - block.times[FORWARD, stage], 0) + 1e-9 for stage in held}
        total = sum(lives.values())
        for _ in range(limits[rank] - len(held)):
            neediest = max(held, key=lambda stage: (limits[rank] * lives[stage] / total - result[stage], -stage))
            result[neediest] += 1
    return result


def repeated(operations: Operations, block: Block) -> list[float]:
    """The key of every operation: its block's time plus a period per micro-batch.

    Weight gradients that the block leaves out come last of all, in the order of their input gradients.
    """
    kinds = (FORWARD, INPUT, WEIGHT) if operations.split else (FORWARD, INPUT)
    keys: list[float] = []
    for kind in kinds:
        for stage in range(operations.stages):
            start = block.times.get((kind, stage), block.times[INPUT, stage] + LATER)
            keys.extend(start + block.period * micro_batch for micro_batch in range(operations.micro_batches))
    return keys


def filled(operations: Operations, keys: list[float]) -> list[float]:
    """The same keys, with the weight gradients last of all: they fill the time in which a rank would stand."""
    size = operations.stages * operations.micro_batches
    return [*keys[: 2 * size], *(key + LATER for key in keys[size : 2 * size])]
