"""DualPipe: micro-batches from both ends at once, over two copies of each stage (DeepSeek-AI 2024, section 3.2.1).

Rank r holds stage r for the first half of the micro-batches, which enter on rank 0, and stage P − 1 − r for the
second half, which enter on rank P − 1. A forward of one direction runs with a backward of the other as one FB.

Makespan for equal stages with P2P free and F ≥ BI (below that some per cent off), n = P/2, K = M − n − 2 fused pairs:
max{3n·F + (n + 2)B, 3n·F + (2n + 1)BI + 3·BW, 2n·F + 3n·BI + 3·BW} + K·FB. Every rank holds P + 1 activations and two
stages of parameters. Takes an even P and an even M ≥ 2P.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ultrascale.pipeline.actions import Action, Kind, Plan, ScheduleError, backward, forward, pair
from ultrascale.pipeline.schedules.placement import bidirectional
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Eight steps for each rank; see `row`. Raises ScheduleError for numbers that it does not take."""
    requires(request)
    ranks, half = request.ranks, request.micro_batches // 2
    rows = []
    for rank in range(ranks):
        down, up = Stream(rank, 0), Stream(ranks - 1 - rank, half)
        near, far = (down, up) if rank < ranks // 2 else (up, down)
        rows.append(row(near, far, half, ranks // 2, min(rank, ranks - 1 - rank)))
    return Plan("dualpipe", bidirectional(ranks), request.micro_batches, tuple(rows))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: P + 1."""
    return (request.ranks + 1,) * request.ranks


def requires(request: Request) -> None:
    """Raises ScheduleError unless P and M are even and M ≥ 2P."""
    ranks, micro_batches = request.ranks, request.micro_batches
    if ranks % 2:
        near = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise ScheduleError(f"dualpipe needs an even number of ranks, {ranks} is odd; use {near}, or dualpipe_v")
    least = 2 * ranks
    if micro_batches < least:
        raise ScheduleError(
            f"dualpipe needs 2 micro-batches for each of its {ranks} ranks, {micro_batches} are too few; use {least} "
            "or more, or zb_v, which takes any number"
        )
    if micro_batches % 2:
        raise ScheduleError(
            f"dualpipe needs an even number of micro-batches, half for each direction, {micro_batches} is odd; use "
            f"{micro_batches - 1 if micro_batches > least else least} or {micro_batches + 1}"
        )


class Stream(NamedTuple):
    """One direction on one rank: its stage there, and its first micro-batch."""

    stage: int
    first: int


def row(near: Stream, far: Stream, micro_batches: int, half: int, depth: int) -> tuple[Action, ...]:
    """The list of a rank that is `depth` ranks from the end where the `near` stream enters, `half` ranks deep.

    micro_batches: of each stream. The steps are those of DeepSeek's published code.
    """
    steps = _Steps(near, far)
    outer = half - depth - 1  # ranks between this one and the middle
    for _ in range(2 * outer):
        steps.run(steps.forward(0))
    for _ in range(depth + 1):
        steps.run(steps.forward(0), steps.forward(1))
    for _ in range(outer):
        steps.split(1)
        steps.weight()
        steps.run(steps.forward(1))
    for turn in range(micro_batches - 2 * half + depth + 1):
        if turn == 0 and outer == 0:
            steps.run(steps.forward(0), steps.backward(1))  # in the middle the one feeds the other: not together
        else:
            steps.run(pair(steps.forward(0), steps.backward(1)))
        steps.run(pair(steps.forward(1), steps.backward(0)))
    for _ in range(outer):
        steps.run(steps.backward(1), pair(steps.forward(1), steps.backward(0)))
    # From half of the drain on weight gradients are kept for its end.
    for turn in range(2 * (depth + 1)):
        stream = 1 - turn % 2
        if turn > depth:
            steps.split(stream)
        else:
            steps.run(steps.backward(stream))
    for _ in range(outer):
        steps.weight()
        steps.split(0)
    for _ in range(depth + 1):
        steps.weight()
    return tuple(steps.actions)


class _Steps:
    """A rank's list under way: micro-batches of each stream in order, weight gradients in one queue over both."""

    def __init__(self, near: Stream, far: Stream) -> None:
        self.streams = (near, far)
        self.forwards = [stream.first for stream in self.streams]
        self.backwards = [stream.first for stream in self.streams]
        self.late: deque[Action] = deque()
        self.actions: list[Action] = []

    def run(self, *actions: Action) -> None:
        self.actions += actions

    def forward(self, stream: int) -> Action:
        self.forwards[stream] += 1
        return forward(self.streams[stream].stage, self.forwards[stream] - 1)

    def backward(self, stream: int) -> Action:
        self.backwards[stream] += 1
        return backward(self.streams[stream].stage, self.backwards[stream] - 1)

    def split(self, stream: int) -> None:
        whole = self.backward(stream)
        self.run(Action(Kind.BI, whole.stage, whole.micro_batch))
        self.late.append(Action(Kind.BW, whole.stage, whole.micro_batch))

    def weight(self) -> None:
        self.run(self.late.popleft())
