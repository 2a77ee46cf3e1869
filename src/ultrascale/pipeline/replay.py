"""An order in which all ranks can run their lists, or the proof that there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ultrascale.pipeline.actions import BACKWARDS, Action, Kind, Plan, ScheduleError

Model = Literal["buffered", "rendezvous", "blocking"]
"""How messages behave.

buffered    a send is done at once; a receive can be posted at any time
rendezvous  what engine.py does: sends and receives are posted, and the list itself never waits for them; a
            message moves once both are posted, and after all earlier ones of its channel; F and B wait
            for their own
blocking    stricter: the list stops at a send until the other end has posted its receive
"""

# What an action gives and another waits for is one number, a token: this is the hot loop of a plan with 64 ranks and
# 1024 micro-batches. A token is a kind of thing, times the number of (stage, micro-batch), plus which of these.
_FORWARD, _GRADIENT, _SENT_ACTIVATION, _SENT_GRADIENT, _POSTED_ACTIVATION, _POSTED_GRADIENT = range(6)

# → the kind of thing that an action gives, and the stage it belongs to, from the action's; messages belong to the
# stage before their cut.
_GIVES = {
    Kind.F: (_FORWARD, 0),
    Kind.B: (_GRADIENT, 0),
    Kind.BI: (_GRADIENT, 0),
    Kind.SEND_F: (_SENT_ACTIVATION, 0),
    Kind.SEND_B: (_SENT_GRADIENT, -1),
    Kind.RECV_F: (_POSTED_ACTIVATION, -1),
    Kind.RECV_B: (_POSTED_GRADIENT, 0),
}
_BLOCKING = {Kind.SEND_F: (_POSTED_ACTIVATION, 0), Kind.SEND_B: (_POSTED_GRADIENT, -1)}


class _Tokens:
    def __init__(self, plan: Plan, model: Model) -> None:
        self.model = model
        self.width = plan.micro_batches
        self.size = plan.stages * plan.micro_batches
        # Where a stage's neighbour runs, for plans whose messages are actions; in others all is as on one rank.
        self.home: dict[int, int] = {}
        if "communication" in plan.passes:
            self.home = {stage * self.width + micro: rank for (stage, micro), rank in plan.runners().items()}

    def given(self, action: Action) -> tuple[int, ...]:
        if action.parts:
            return sum(map(self.given, action.parts), ())
        found = _GIVES.get(action.kind)
        if found is None:
            return ()
        return (found[0] * self.size + (action.stage + found[1]) * self.width + action.micro_batch,)

    def awaited(self, rank: int, action: Action) -> tuple[int, ...]:
        kind, size, own = action.kind, self.size, action.stage * self.width + action.micro_batch
        if kind is Kind.F:
            if action.stage == 0:
                return ()
            before = own - self.width
            return (before if self.home.get(before, rank) == rank else _SENT_ACTIVATION * size + before,)
        if kind is Kind.B or kind is Kind.BI:
            behind = own + self.width
            if behind >= size:
                return (own,)
            here = self.home.get(behind, rank) == rank
            return (own, _GRADIENT * size + behind if here else _SENT_GRADIENT * size + own)
        if kind is Kind.BW:
            return (_GRADIENT * size + own,)
        if action.parts:
            return sum((self.awaited(rank, part) for part in action.parts), ())
        if self.model == "blocking" and kind in _BLOCKING:
            what, shift = _BLOCKING[kind]
            return (what * size + own + shift * self.width,)
        return ()


def replay(plan: Plan, model: Model = "rendezvous") -> Iterator[tuple[int, int, Action]]:
    """(rank, index, action) of every action, each after everything that it waits for.

    Raises ScheduleError when the ranks come to stand still: it names the action at which the lowest rank of
    the circle waits, and the whole circle. In a validated plan the receives of a channel stand in the order
    of its sends, so that "rendezvous" moves whatever "buffered" moves.
    """
    tokens = _Tokens(plan, model)
    position = [0] * plan.ranks
    have: set[int] = set()
    sleepers: dict[int, list[int]] = {}
    ready = list(range(plan.ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        actions = plan.actions[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((token for token in tokens.awaited(rank, action) if token not in have), None)
            if missing is not None:
                sleepers.setdefault(missing, []).append(rank)
                break
            yield rank, position[rank], action
            position[rank] += 1
            for token in tokens.given(action):
                have.add(token)
                if token in sleepers:
                    ready.extend(sleepers.pop(token))
    if sleepers:
        raise _standstill(plan, tokens, position, sleepers)


def _standstill(plan: Plan, tokens: _Tokens, position: list[int], sleepers: dict[int, list[int]]) -> ScheduleError:
    awaited = {rank: token for token, ranks in sleepers.items() for rank in ranks}
    giver = {
        token: (rank, index, action)
        for rank, actions in enumerate(plan.actions)
        for index, action in enumerate(actions)
        for token in tokens.given(action)
    }
    rank = min(awaited)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        if awaited[rank] not in giver:
            action = plan.actions[rank][position[rank]]
            return ScheduleError("waits for something that no rank does", rank, position[rank], action)
        rank = giver[awaited[rank]][0]
    circle = path[path.index(rank) :]
    circle = circle[circle.index(min(circle)) :] + circle[: circle.index(min(circle))]
    steps = []
    for rank in circle:
        other, index, action = giver[awaited[rank]]
        steps.append(
            f"rank {rank} stands at {plan.actions[rank][position[rank]]} (action {position[rank]}) "
            f"until rank {other} has done {action} (action {index})"
        )
    first = circle[0]
    return ScheduleError(
        f"a circle of waiting under {tokens.model} sends: {'; '.join(steps)}",
        first,
        position[first],
        plan.actions[first][position[first]],
    )


def last_backwards(plan: Plan, rank: int) -> dict[int, int]:
    """Stage → index of the last action of the rank that gives it a weight gradient (B or BW)."""
    return {
        part.stage: index
        for index, action in enumerate(plan.actions[rank])
        for part in action.computes
        if part.kind in BACKWARDS and part.kind is not Kind.BI
    }
