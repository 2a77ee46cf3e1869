"""ZB-H2, also ZB2P: zero bubble in twice 1F1B's memory (Qi et al. 2023, arXiv 2401.10241, sections 2.3 and 3.1).

The paper gives no closed order but a heuristic for the costs at hand. With F = BI = BW no rank stands between its first
and its last action: the makespan is M(F + BI + BW) + (P − 1)F, of which only the fill is lost.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules import zb_h1
from ultrascale.pipeline.schedules.placement import linear
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.searched import searched


def schedule(request: Request) -> Plan:
    """The shortest order found with at most 2P activations per rank; never longer than ZB-H1."""
    ranks = request.ranks
    # The paper's warm-up of 2(P − r) − 1 fills the bubble of equal costs; the full limit hides more latency.
    aheads = ([2 * (ranks - rank) - 1 for rank in range(ranks)], [2 * ranks] * ranks)
    seeds = (zb_h1.schedule(request),)
    return searched("zb2p_auto", request, linear(ranks), memory_bound(request), seeds, aheads=aheads, spans=True)


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: min(M, 2P)."""
    return (min(request.micro_batches, 2 * request.ranks),) * request.ranks
