"""Interleaved zero bubble: interleaved 1F1B with a split backward (PyTorch's ScheduleInterleavedZeroBubble).

The warm-up is shorter than in interleaved.py by P − 1 − r, and rank r runs each weight gradient r turns after its
input gradient, so that later ranks have work to fill the drain with (Qi et al. 2023, ZB-H1, is the case V = 1).

Makespan, in costs per stage: V·M(F + BI + BW) + (P − 1)·F when F = BI = BW, P | M and P2P is free. Every rank holds
min(V·M, (V − 1)·N + P) activations to the end of BW: with N = P, its V·P. Groups are as in interleaved.py.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Action, Kind, Plan
from ultrascale.pipeline.schedules import interleaved
from ultrascale.pipeline.schedules.placement import loop
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Rank r: w = (V − 1)·N + P − 1 − r forwards; then F, BI and the BW of r turns ago; then r weight gradients."""
    placement = loop(request.ranks, request.virtual_stages)
    return Plan("interleaved_zb", placement, request.micro_batches, rows(request))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: min(V·M, (V − 1)·N + P)."""
    most = request.virtual_stages * request.micro_batches
    held = (request.virtual_stages - 1) * max(interleaved.groups(request)) + request.ranks
    return (min(most, held),) * request.ranks


def rows(request: Request) -> tuple[tuple[Action, ...], ...]:
    """The lists of all ranks."""
    turns = interleaved.forward_turns(request)
    ahead = (request.virtual_stages - 1) * max(interleaved.groups(request))
    lists = []
    for rank in range(request.ranks):
        forwards, backwards = interleaved.actions_of(request, rank, turns)
        lists.append(_row(forwards, backwards, warm_up=ahead + request.ranks - 1 - rank, delay=rank))
    return tuple(lists)


def _row(forwards: list[Action], backwards: list[Action], warm_up: int, delay: int) -> tuple[Action, ...]:
    row = forwards[:warm_up]
    for turn, whole in enumerate(backwards):
        if warm_up + turn < len(forwards):
            row.append(forwards[warm_up + turn])
        row.append(Action(Kind.BI, whole.stage, whole.micro_batch))
        if turn >= delay:
            late = backwards[turn - delay]
            row.append(Action(Kind.BW, late.stage, late.micro_batch))
    row += (Action(Kind.BW, late.stage, late.micro_batch) for late in backwards[max(0, len(backwards) - delay) :])
    return tuple(row)
