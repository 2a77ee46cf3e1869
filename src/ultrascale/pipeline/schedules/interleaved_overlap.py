"""Interleaved 1F1B whose steady pairs run as one FB, so that the all-to-all of one hides under the other's compute.

(Megatron-Core's `overlap_moe_expert_parallel_comm`.) One more forward of warm-up than in interleaved.py makes the
forward and the backward of a pair independent of each other; group sizes are as there.

Makespan, in costs per stage: (V·M + P − 1)(F + B) for equal stages, when FB = F + B, P | M and P2P is free; a cheaper
FB makes it shorter. Rank r holds min(V·M, 2(P − 1 − r) + (V − 1)·N + 2) activations.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan, pair
from ultrascale.pipeline.schedules import interleaved
from ultrascale.pipeline.schedules.placement import loop
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Rank r: w + 1 forwards, FB of the next forward with the first open backward, then the backwards left."""
    turns = interleaved.forward_turns(request)
    rows = []
    for rank in range(request.ranks):
        count = _warm_up(request, rank)
        forwards, backwards = interleaved.actions_of(request, rank, turns)
        pairs = (pair(*both) for both in zip(forwards[count:], backwards, strict=False))
        rows.append((*forwards[:count], *pairs, *backwards[len(forwards) - count :]))
    placement = loop(request.ranks, request.virtual_stages)
    return Plan("interleaved_1f1b_a2a_overlap", placement, request.micro_batches, tuple(rows))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that rank r holds at most: the warm-up and one more, or all."""
    most = request.virtual_stages * request.micro_batches
    return tuple(min(most, _warm_up(request, rank) + 1) for rank in range(request.ranks))


def _warm_up(request: Request, rank: int) -> int:
    return min(request.virtual_stages * request.micro_batches, interleaved.warm_up(request, rank) + 1)
