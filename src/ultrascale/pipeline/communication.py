"""From compute actions to what the engine runs: messages and reductions put into the lists."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from operator import itemgetter

from ultrascale.pipeline.actions import (
    COMPUTE,
    SENDS,
    Action,
    Kind,
    Payload,
    Plan,
    ScheduleError,
)

Channel = tuple[int, int, Payload]
"""(source rank, destination rank, payload): messages on a channel arrive in the order of their sends."""


_ONWARD: dict[int, tuple[Kind, Kind, Payload]] = {
    1: (Kind.SEND_F, Kind.RECV_F, "activation"),
    -1: (Kind.SEND_B, Kind.RECV_B, "gradient"),
}
"""What goes to the next stage, and to the one before."""


def insert_communication(plan: Plan) -> Plan:
    """The plan with SEND and RECV actions where neighbouring stages run on different ranks.

    A send stands right after the action that makes the tensor. A receive is posted one compute action before
    the one that needs it, so that it is there when the sender comes, and holds its buffer no longer than
    that; but never after the receive of a message that is sent later on the same channel, so that both ends
    see a channel in one order.

    Raises ScheduleError when a neighbour of a compute action is run by no rank, or messages are there
    already.
    """
    if "communication" in plan.passes:
        raise ScheduleError(f"the plan {plan.name} has its messages already")
    runners = plan.runners()

    sends: list[dict[int, list[Action]]] = [defaultdict(list) for _ in range(plan.ranks)]
    channels: dict[Channel, list[Action]] = defaultdict(list)  # the receives, in the order of the sends
    needed: dict[int, int] = {}  # what a receive is for → index of the action that needs it, in its rank's list
    width = plan.micro_batches
    for rank, index, part in plan.computes():
        kind, stage, micro_batch = part.kind, part.stage, part.micro_batch
        if kind is Kind.BW:
            continue
        onward = 1 if kind is Kind.F else -1
        if 0 <= stage + onward < plan.stages and (target := _runner(runners, part, onward, rank, index)) != rank:
            send, receive, payload = _ONWARD[onward]
            sends[rank][index].append(Action(send, stage, micro_batch, peer=target))
            channels[rank, target, payload].append(Action(receive, stage + onward, micro_batch, peer=rank))
        if 0 <= stage - onward < plan.stages and _runner(runners, part, -onward, rank, index) != rank:
            needed[2 * (stage * width + micro_batch) + (onward < 0)] = index

    receives: list[dict[int, list[tuple[int, Action]]]] = [defaultdict(list) for _ in range(plan.ranks)]
    before = [_previous_compute(actions) for actions in plan.actions]
    for (source, target, payload), posted in channels.items():
        gradient = payload == "gradient"
        latest = len(plan.actions[target])
        places = []
        for message in reversed(posted):
            place = needed.get(2 * (message.stage * width + message.micro_batch) + gradient)
            if place is None:
                raise ScheduleError(f"nothing on rank {target} needs {message.message}, which rank {source} makes")
            # No later than the next message of the channel: a running minimum, from the last message back.
            latest = min(latest, place)
            places.append(latest)
        for message, place in zip(posted, reversed(places), strict=True):
            receives[target][before[target][place]].append((place, message))

    lists = []
    for rank, actions in enumerate(plan.actions):
        row: list[Action] = []
        for index, action in enumerate(actions):
            # What is needed first is posted first; the sort is stable, so that channels keep their order.
            if index in receives[rank]:
                row += (receive for _, receive in sorted(receives[rank][index], key=itemgetter(0)))
            row.append(action)
            if index in sends[rank]:
                row += sends[rank][index]
        lists.append(tuple(row))
    return replace(plan, actions=tuple(lists), passes=(*plan.passes, "communication"))


def channel_of(rank: int, action: Action) -> Channel:
    """The channel of a SEND or RECV in the list of `rank`. Raises ScheduleError for other kinds."""
    if action.peer is None:
        raise ScheduleError(f"{action} carries no message")
    payload: Payload = "activation" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "gradient"
    return (rank, action.peer, payload) if action.kind in SENDS else (action.peer, rank, payload)


def _runner(runners: dict[tuple[int, int], int], part: Action, onward: int, rank: int, index: int) -> int:
    runner = runners.get((part.stage + onward, part.micro_batch))
    if runner is None:
        neighbour = f"F{part.stage + onward}.{part.micro_batch}"
        raise ScheduleError(f"its neighbour {neighbour} is run by no rank", rank, index, part)
    return runner


def _previous_compute(actions: tuple[Action, ...]) -> list[int]:
    """Index of the compute action before each index; the index itself where there is none."""
    previous: list[int] = []
    last: int | None = None
    for index, action in enumerate(actions):
        previous.append(index if last is None else last)
        if action.kind in COMPUTE:
            last = index
    return previous
