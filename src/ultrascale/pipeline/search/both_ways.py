"""Whole backwards searched from both ends of the step.

Read backwards in time, a step of forwards and whole backwards is one again: B of a stage is then its forward and F its
backward, and what holds an activation from F to B holds it from B to F. A greedy list packs the begin of what it is
given better than the end, so each direction finds orders that the other does not, and goes on from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules.placement import Placement
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.building_block import Block
from ultrascale.pipeline.search.operations import FORWARD, INPUT, Operations, Orders
from ultrascale.pipeline.search.portfolio import Portfolio
from ultrascale.pipeline.search.searched import plan_of

BUDGET = 1_000_000
"""Operations visited in each direction: some seconds of Python for eight ranks and 32 micro-batches."""

STEPS = 40
EXCHANGES = 2


def searched_both_ways(
    name: str, request: Request, placement: Placement, limits: Sequence[int], blocks: Iterable[Block]
) -> Plan:
    """The shortest plan of whole backwards found for the request's costs, under `limits` activations per rank."""
    operations = Operations(placement, request.micro_batches, request.costs, split=False)
    onward, back = Portfolio(operations, limits, BUDGET), Portfolio(mirrored(operations), limits, BUDGET)
    for block in blocks:
        onward.repeat(f"{name}'s block", block)
        back.repeat(f"{name}'s block", _mirrored_block(block))
    for _ in range(EXCHANGES):
        for portfolio in (onward, back):
            portfolio.improve(STEPS, 2)
        pairs = ((onward, list(back.candidates)), (back, list(onward.candidates)))
        for portfolio, found in pairs:
            for candidate in found:
                portfolio.offer(candidate.origin, mirrored_orders(operations, candidate.orders))
    return plan_of(name, operations, onward.best.orders)


def mirrored(operations: Operations) -> Operations:
    """The same step from its end to its begin: F takes the time of B, and B that of F."""
    stages = range(operations.stages)
    forward, backward = (
        tuple(operations.duration[operations.number(kind, stage, 0)] for stage in stages) for kind in (FORWARD, INPUT)
    )
    costs = Costs(F=backward, BI=forward, BW=0, P2P=operations.costs.hop)
    return Operations(operations.placement, operations.micro_batches, costs, split=False)


def mirrored_orders(operations: Operations, orders: Orders) -> Orders:
    """Orders from the other end; twice gives them again. The last micro-batch becomes the first."""
    result: Orders = []
    for row in orders:
        parts = (operations.parts(operation) for operation in reversed(row))
        last = operations.micro_batches - 1
        result.append([operations.number(INPUT - kind, stage, last - number) for kind, stage, number in parts])
    return result


def _mirrored_block(block: Block) -> Block:
    """F takes one slot and a whole backward two; where one ended, the other begins."""
    slots = {FORWARD: 1, INPUT: 2}
    times = {(INPUT - kind, stage): -(start + slots[kind]) for (kind, stage), start in block.times.items()}
    return Block(times, block.period)
