"""Interleaved 1F1B with an adjustable number N of micro-batches in a group (Llama Team 2024, section 3.3.2).

Between P, which is interleaved 1F1B, and M, which runs forwards breadth-first: a message has the time of N − P
forwards to arrive before anyone waits for it, and activations grow with (V − 1)·N. N = 2P unless `group_size` says
otherwise, or the name does: `grouped_interleaved_N=2P`, `…_N=M`, `…_N=12`.

Makespan, memory: as interleaved.py; at P2P = 0 the group's size changes only what is held.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ultrascale.pipeline.actions import Plan, ScheduleError
from ultrascale.pipeline.schedules import interleaved
from ultrascale.pipeline.schedules.request import Request

_SIZE = re.compile(r"(\d{1,9})?([pm])?", re.ASCII | re.IGNORECASE)


def schedule(request: Request) -> Plan:
    """Per rank as interleaved.py, with groups of N."""
    return replace(interleaved.schedule(_sized(request)), name="grouped_interleaved")


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that rank r holds at most: min(V·M, 2(P − 1 − r) + (V − 1)·N + 1)."""
    return interleaved.memory_bound(_sized(request))


def parse_size(text: str) -> Callable[[Request], int]:
    """`12`, `P`, `2P`, `M` as the group size of a request. Raises ScheduleError for anything else."""
    found = _SIZE.fullmatch(text)
    if found is None or not text or (found[1] is not None and int(found[1]) == 0):
        raise ScheduleError(f"N={text.upper()} is not a size of groups; write a number, P, 2P or M")
    factor = int(found[1] or 1)
    unit = (found[2] or "").upper()
    return lambda request: factor * {"": 1, "P": request.ranks, "M": request.micro_batches}[unit]


def _sized(request: Request) -> Request:
    return replace(request, group_size=request.group_size or 2 * request.ranks)
