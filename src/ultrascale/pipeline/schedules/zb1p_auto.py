"""Zero bubble in 1F1B's memory, ordered for the costs at hand (Qi et al. 2023, arXiv 2401.10241, section 3.1).

ZB-H1 is best where F = BI = BW; for other costs forwards and weight gradients are placed anew under the same limit.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules import zb_h1
from ultrascale.pipeline.schedules.placement import linear
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.searched import searched


def schedule(request: Request) -> Plan:
    """The shortest order found with at most P activations per rank; never longer than ZB-H1."""
    ranks = request.ranks
    # 1F1B's depth keeps least to the end of BI; the full limit hides more latency.
    aheads = ([ranks - rank for rank in range(ranks)], [ranks] * ranks)
    seeds = (zb_h1.schedule(request),)
    return searched("zb1p_auto", request, linear(ranks), memory_bound(request), seeds, aheads=aheads, spans=True)


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: min(M, P)."""
    return (min(request.micro_batches, request.ranks),) * request.ranks
