"""Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM, section 2.2): several stages a rank, laid around in a loop.

Micro-batches go through a rank's stages in groups of N: the group through the first stage, then through the second,
…; backward the same with the stages reversed. N = P unless `group_size` says more: then messages have longer to
arrive, and more activations are held. N = M with a single group is breadth-first forward. See also grouped.py.

Makespan, in costs per stage (a stage is 1/V of a rank's layers): (V·M + P − 1)(F + B) for equal stages, when every
group has at least P micro-batches and P2P is free; with N = P > 1, P | M and P2P small, 2(V·P − 1)·P2P more.
Rank r holds min(V·M, 2(P − 1 − r) + (V − 1)·N + 1) activations, N being the largest group.
"""

from __future__ import annotations

from itertools import chain

from ultrascale.pipeline.actions import Action, Plan, ScheduleError, backward, forward
from ultrascale.pipeline.schedules.placement import loop
from ultrascale.pipeline.schedules.request import Request

Turn = tuple[int, int]
"""(which of the rank's stages, micro-batch)"""


def schedule(request: Request) -> Plan:
    """Rank r: w = 2(P − 1 − r) + (V − 1)·N forwards, then (F, B) pairs, then the backwards that are left."""
    turns = forward_turns(request)
    rows = []
    for rank in range(request.ranks):
        count = warm_up(request, rank)
        forwards, backwards = actions_of(request, rank, turns)
        pairs = zip(forwards[count:], backwards, strict=False)
        rows.append((*forwards[:count], *chain.from_iterable(pairs), *backwards[len(forwards) - count :]))
    return Plan("interleaved_1f1b", loop(request.ranks, request.virtual_stages), request.micro_batches, tuple(rows))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that rank r holds at most: the warm-up and one more, or all."""
    most = request.virtual_stages * request.micro_batches
    return tuple(min(most, warm_up(request, rank) + 1) for rank in range(request.ranks))


def requires(request: Request) -> None:
    """Raises ScheduleError for groups smaller than the ranks are many: the pipeline would run empty in each."""
    needed = min(request.ranks, request.micro_batches)
    if request.group_size is not None and request.group_size < needed:
        raise ScheduleError(
            f"group_size={request.group_size} is less than the {request.ranks} ranks, which leaves them idle in every "
            f"group; use {needed} to {request.micro_batches}, or leave it out"
        )


def warm_up(request: Request, rank: int) -> int:
    """Forwards before the first backward: the way to the last stage and back, of one micro-batch in its group."""
    ahead = 2 * (request.ranks - 1 - rank) + (request.virtual_stages - 1) * max(groups(request))
    return min(request.virtual_stages * request.micro_batches, ahead)


def groups(request: Request) -> list[int]:
    """Sizes of the groups of micro-batches, in order.

    What is left over is a group of its own when it fills the pipeline; otherwise it is spread over the others.
    """
    micro_batches = request.micro_batches
    size = min(request.group_size or request.ranks, micro_batches)
    whole, left = divmod(micro_batches, size)
    if left >= request.ranks:
        return [size] * whole + [left]
    return [size + left // whole + (group < left % whole) for group in range(whole)]


def forward_turns(request: Request) -> list[Turn]:
    """The order of the forwards, the same on every rank. Backwards take the stages in reverse."""
    turns: list[Turn] = []
    first = 0
    for size in groups(request):
        for chunk in range(request.virtual_stages):
            turns += ((chunk, micro_batch) for micro_batch in range(first, first + size))
        first += size
    return turns


def actions_of(request: Request, rank: int, turns: list[Turn]) -> tuple[list[Action], list[Action]]:
    """The forwards and the backwards of a rank, each in its order."""
    last = request.virtual_stages - 1
    forwards = [forward(chunk * request.ranks + rank, micro_batch) for chunk, micro_batch in turns]
    backwards = [backward((last - chunk) * request.ranks + rank, micro_batch) for chunk, micro_batch in turns]
    return forwards, backwards
