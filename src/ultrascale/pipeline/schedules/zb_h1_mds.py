"""ZB-H1 that splits the backward only at both ends (Megatron-DeepSpeed's variant): fewer split passes to pay for.

Makespan as zb_h1.py at P2P = 0, longer with latency. Rank r keeps its first r weight gradients for the drain, so that
gradients are summed in another order than in 1F1B. Every rank holds min(M, P) activations to the end of B or BW.
"""

from __future__ import annotations

from collections import deque

from ultrascale.pipeline.actions import Action, Kind, Plan, backward, forward
from ultrascale.pipeline.schedules.placement import linear
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.schedules.zb_h1 import memory_bound as memory_bound


def schedule(request: Request) -> Plan:
    """Rank r: P − 1 − r forwards; r pairs (F, BI); pairs (F, B); from the last forward on (BI, oldest BW)."""
    rows = tuple(_row(rank, request.ranks, request.micro_batches) for rank in range(request.ranks))
    return Plan("zb_h1_mds", linear(request.ranks), request.micro_batches, rows)


def _row(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = ranks - 1 - rank
    row = [forward(rank, micro_batch) for micro_batch in range(min(ahead, micro_batches))]
    late: deque[int] = deque()
    for micro_batch in range(micro_batches):
        if micro_batch + ahead < micro_batches:
            row.append(forward(rank, micro_batch + ahead))
        drains = micro_batch + ahead >= micro_batches - 1
        if micro_batch >= rank and (not drains or not late):
            row.append(backward(rank, micro_batch))
            continue
        row.append(Action(Kind.BI, rank, micro_batch))
        late.append(micro_batch)
        if micro_batch >= rank:
            row.append(Action(Kind.BW, rank, late.popleft()))
    row += (Action(Kind.BW, rank, micro_batch) for micro_batch in late)
    return tuple(row)
