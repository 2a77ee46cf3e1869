"""DualPipeV: DualPipe cut in half, with one copy of the parameters (Sea AI Lab's proposal; code by DeepSeek-AI 2025).

Two stages a rank, down the ranks and up again; a forward of the one runs with a backward of the other as one FB.

Makespan as dualpipe.py's with P for n and 2M for M: on P ranks what DualPipe needs on 2P with 2M micro-batches. Every
rank holds 2P + 1 activations, in stages of half a rank's layers. Takes M ≥ 2P.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan, ScheduleError
from ultrascale.pipeline.schedules.dualpipe import Stream, row
from ultrascale.pipeline.schedules.placement import v_shape
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """DualPipe's eight steps for each rank. Raises ScheduleError when M < 2P."""
    requires(request)
    ranks = request.ranks
    rows = tuple(
        row(Stream(rank, 0), Stream(2 * ranks - 1 - rank, 0), request.micro_batches, ranks, rank)
        for rank in range(ranks)
    )
    return Plan("dualpipe_v", v_shape(ranks), request.micro_batches, rows)


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: 2P + 1."""
    return (2 * request.ranks + 1,) * request.ranks


def requires(request: Request) -> None:
    """Raises ScheduleError unless M ≥ 2P."""
    if request.micro_batches < 2 * request.ranks:
        raise ScheduleError(
            f"dualpipe_v needs 2 micro-batches for each of its {request.ranks} ranks, {request.micro_batches} are too "
            f"few; use {2 * request.ranks} or more, or zb_v, which takes any number"
        )
