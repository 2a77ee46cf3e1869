"""ZB-V ordered for the costs at hand (Qi et al. 2023, arXiv 2401.10241, section 6).

Two stages a rank, down the ranks and up again, in 1F1B's memory: 2P of these halves. The closed order of zb_v.py is
best where F = BI = BW and messages are free.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules import zb_v
from ultrascale.pipeline.schedules.placement import v_shape
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.searched import searched


def schedule(request: Request) -> Plan:
    """The shortest order found with at most 2P activations per rank; never longer than ZB-V."""
    return searched("zb_v_auto", request, v_shape(request.ranks), memory_bound(request), (zb_v.schedule(request),))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: min(2M, 2P), each of half a rank's layers."""
    return (2 * min(request.micro_batches, request.ranks),) * request.ranks
