"""ZB-H1, also ZB1P: 1F1B with a split backward, in 1F1B's peak memory (Qi et al. 2023, section 2.3).

Makespan M(F + BI + BW) + (P − 1)·max(BI, F + BI − min(BI, BW)) for equal stages, M ≥ P, P2P free: a third of 1F1B's
bubble when F = BI = BW. Every rank holds min(M, P) activations to the end of BW; to the end of BI only, 1F1B's.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules import interleaved_zb
from ultrascale.pipeline.schedules.placement import linear
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Rank r: P − 1 − r forwards; then F, BI and the BW of r turns ago; then the last r weight gradients."""
    return Plan("zb_h1", linear(request.ranks), request.micro_batches, interleaved_zb.rows(request))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: min(M, P)."""
    return (min(request.micro_batches, request.ranks),) * request.ranks
