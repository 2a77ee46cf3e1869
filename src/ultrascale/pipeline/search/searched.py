"""From a request to the plan of a search with a fixed recipe: seeds, building blocks, draws, local search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules.placement import Placement
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.building_block import Block
from ultrascale.pipeline.search.operations import Operations, Orders
from ultrascale.pipeline.search.portfolio import Portfolio, fusible

BUDGET = 250_000
"""Operations visited for a schedule of a fixed recipe: some tenths of a second of Python."""

DRAWS = 30
STEPS = 40
ROUNDS = 4


def searched(
    name: str,
    request: Request,
    placement: Placement,
    limits: Sequence[int],
    seeds: Iterable[Plan] = (),
    blocks: Iterable[Block] = (),
    aheads: Sequence[Sequence[int]] = (),
    spans: bool = False,
) -> Plan:
    """The shortest plan found for the request's costs, under `limits` activations per rank.

    seeds   plans to start from; those above the limit give their priorities only
    blocks  times of one micro-batch, to be repeated
    aheads  variants of how far forwards may be ahead of input gradients, tightest first
    spans   among the shortest makespans, one with a short span
    """
    operations = Operations(placement, request.micro_batches, request.costs)
    portfolio = Portfolio(operations, limits, BUDGET, aheads, spans)
    for plan in seeds:
        portfolio.seed(plan)
    for block in blocks:
        portfolio.repeat(f"{name}'s block", block)
    portfolio.draw(DRAWS)
    portfolio.retime()
    portfolio.improve(STEPS, ROUNDS)
    return plan_of(name, operations, portfolio.best.orders, spans)


def plan_of(name: str, operations: Operations, orders: Orders, spans: bool = False) -> Plan:
    """Orders as a plan, in which only those backwards are split whose splitting gains."""
    fused = fusible(operations, orders, spans) if operations.split else frozenset()
    return Plan(name, operations.placement, operations.micro_batches, operations.actions_of(orders, fused))
