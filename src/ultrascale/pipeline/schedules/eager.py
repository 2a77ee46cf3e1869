"""Eager 1F1B: 1F1B with twice the forwards ahead, so that a message has the time of a whole turn to arrive.

Makespan (M + P − 1)(F + B) + 2(P − 1)·P2P for equal stages and P2P ≤ (F + B)/2, where 1F1B pays latency again with
every P micro-batches. Rank r holds min(M, 2(P − 1 − r) + 1) activations.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules.one_f_one_b import rows
from ultrascale.pipeline.schedules.placement import linear
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Rank r: min(M, 2(P − 1 − r)) forwards, then (F, B) pairs, then the backwards that are left."""
    warm_ups = [2 * (request.ranks - 1 - rank) for rank in range(request.ranks)]
    return Plan("1f1b_eager", linear(request.ranks), request.micro_batches, rows(warm_ups, request.micro_batches))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that rank r holds at most: min(M, 2(P − 1 − r) + 1)."""
    return tuple(min(request.micro_batches, 2 * (request.ranks - 1 - rank) + 1) for rank in range(request.ranks))
