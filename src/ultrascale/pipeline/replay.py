"""An order in which all ranks can run their lists, or the proof that there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ultrascale.pipeline.actions import BACKWARDS, RECEIVES, SENDS, Action, Kind, Plan, ScheduleError

Model = Literal["buffered", "rendezvous", "blocking"]
"""How messages behave.

buffered    a send is done at once; a receive can be posted at any time
rendezvous  what engine.py does: sends and receives are posted, and the list itself never waits for them; a
            message moves once both are posted, and after all earlier ones of its channel; F and B wait
            for their own
blocking    stricter: the list stops at a send until the other end has posted its receive
"""

# What one action gives and another waits for. A token is one integer: these sets are the hot loop of a plan
# with 64 ranks and 1024 micro-batches.
_FORWARD, _GRADIENT, _SENT_ACTIVATION, _SENT_GRADIENT, _POSTED_ACTIVATION, _POSTED_GRADIENT = range(6)


class _Tokens:
    def __init__(self, plan: Plan, model: Model) -> None:
        self.plan = plan
        self.model = model
        self.width = plan.micro_batches
        self.size = plan.stages * plan.micro_batches
        self.runners = plan.runners()
        self.lowered = "communication" in plan.passes

    def token(self, what: int, stage: int, micro_batch: int) -> int:
        return what * self.size + stage * self.width + micro_batch

    def given(self, action: Action) -> list[int]:
        kind, micro_batch = action.kind, action.micro_batch
        if kind in SENDS or kind in RECEIVES:
            gradient = kind in (Kind.SEND_B, Kind.RECV_B)
            what = (_SENT_ACTIVATION if kind in SENDS else _POSTED_ACTIVATION) + gradient
            return [self.token(what, action.message.boundary, micro_batch)]
        tokens = []
        for part in action.computes:
            if part.kind is Kind.F:
                tokens.append(self.token(_FORWARD, part.stage, part.micro_batch))
            elif part.kind is not Kind.BW:
                tokens.append(self.token(_GRADIENT, part.stage, part.micro_batch))
        return tokens

    def awaited(self, rank: int, action: Action) -> list[int]:
        kind = action.kind
        if kind in SENDS:
            if self.model != "blocking":
                return []
            what = _POSTED_GRADIENT if kind is Kind.SEND_B else _POSTED_ACTIVATION
            return [self.token(what, action.message.boundary, action.micro_batch)]
        tokens = []
        for part in action.computes:
            stage, micro_batch = part.stage, part.micro_batch
            if part.kind is Kind.F:
                if stage > 0:
                    what = _SENT_ACTIVATION if self._apart(rank, stage - 1, micro_batch) else _FORWARD
                    tokens.append(self.token(what, stage - 1, micro_batch))
            elif part.kind is Kind.BW:
                tokens.append(self.token(_GRADIENT, stage, micro_batch))
            else:
                tokens.append(self.token(_FORWARD, stage, micro_batch))
                if stage < self.plan.stages - 1:
                    if self._apart(rank, stage + 1, micro_batch):
                        tokens.append(self.token(_SENT_GRADIENT, stage, micro_batch))
                    else:
                        tokens.append(self.token(_GRADIENT, stage + 1, micro_batch))
        return tokens

    def _apart(self, rank: int, neighbour: int, micro_batch: int) -> bool:
        return self.lowered and self.runners.get((neighbour, micro_batch)) != rank


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
            missing = [token for token in tokens.awaited(rank, action) if token not in have]
            if missing:
                sleepers.setdefault(missing[0], []).append(rank)
                break
            yield rank, position[rank], action
            position[rank] += 1
            for token in tokens.given(action):
                have.add(token)
                ready.extend(sleepers.pop(token, ()))
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
