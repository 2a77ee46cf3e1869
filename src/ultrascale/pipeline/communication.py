"""From compute actions to what the engine runs: messages and reductions put into the lists."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter

from ultrascale.pipeline.actions import (
    COMPUTE,
    MESSAGES,
    SENDS,
    Action,
    Kind,
    Message,
    Payload,
    Plan,
    ScheduleError,
)
from ultrascale.pipeline.replay import last_backwards

Channel = tuple[int, int, Payload]
"""(source rank, destination rank, payload): messages on a channel arrive in the order of their sends."""


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
    channels: dict[Channel, list[Message]] = defaultdict(list)  # in the order of the sends
    needed: dict[Message, int] = {}  # → index of the action that needs it, in its rank's list
    for rank, index, part in plan.computes():
        stage, micro_batch = part.stage, part.micro_batch
        if part.kind is Kind.BW:
            continue
        payload: Payload = "activation" if part.kind is Kind.F else "gradient"
        onward = 1 if part.kind is Kind.F else -1
        if 0 <= stage + onward < plan.stages:
            target = _runner(runners, part, stage + onward, rank, index)
            if target != rank:
                send = Action(Kind.SEND_F if onward > 0 else Kind.SEND_B, stage, micro_batch, peer=target)
                sends[rank][index].append(send)
                channels[rank, target, payload].append(send.message)
        if 0 <= stage - onward < plan.stages and _runner(runners, part, stage - onward, rank, index) != rank:
            boundary = stage - 1 if onward > 0 else stage
            needed[Message(payload, boundary, micro_batch)] = index

    receives: list[dict[int, list[tuple[int, Action]]]] = [defaultdict(list) for _ in range(plan.ranks)]
    before = [_previous_compute(actions) for actions in plan.actions]
    for (source, target, payload), messages in channels.items():
        for message in messages:
            if message not in needed:
                raise ScheduleError(f"nothing on rank {target} needs {message}, which rank {source} makes")
        # No later than the next message of the channel: a running minimum, from the last message back.
        latest = list(accumulate((needed[message] for message in reversed(messages)), min))[::-1]
        for message, index in zip(messages, latest, strict=True):
            if payload == "activation":
                receive = Action(Kind.RECV_F, message.boundary + 1, message.micro_batch, peer=source)
            else:
                receive = Action(Kind.RECV_B, message.boundary, message.micro_batch, peer=source)
            receives[target][before[target][index]].append((index, receive))

    lists = []
    for rank, actions in enumerate(plan.actions):
        row: list[Action] = []
        for index, action in enumerate(actions):
            # What is needed first is posted first; the sort is stable, so that channels keep their order.
            row += (receive for _, receive in sorted(receives[rank][index], key=itemgetter(0)))
            row.append(action)
            row += sends[rank][index]
        lists.append(tuple(row))
    return replace(plan, actions=tuple(lists), passes=(*plan.passes, "communication"))


def insert_reduce(plan: Plan) -> Plan:
    """The plan with one REDUCE per stage that a rank holds, where its gradients are finished.

    That is after the stage's last B or BW, and after the sends of that action, which others wait for. The
    stages of a schedule with two copies are reduced last, in the order of the model: the holders of the
    copies meet in these reductions, and must come to them in the same order. A forward-only plan stays as it
    is.

    Raises ScheduleError when a stage has no backward on a rank that holds it, or reductions are there
    already.
    """
    if "reduce" in plan.passes:
        raise ScheduleError(f"the plan {plan.name} has its reductions already")
    if plan.forward_only:
        return plan
    lists = []
    for rank, actions in enumerate(plan.actions):
        last = last_backwards(plan, rank)
        due: dict[int, list[Action]] = defaultdict(list)
        for stage in plan.stages_of(rank):
            if stage not in last:
                raise ScheduleError(f"stage {stage} has no B or BW, so that its gradient is never finished", rank)
            index = last[stage] if len(plan.placement[stage]) == 1 else max(last.values())
            while index + 1 < len(actions) and actions[index + 1].kind in SENDS:
                index += 1
            due[index].append(Action(Kind.REDUCE, stage))
        row: list[Action] = []
        for index, action in enumerate(actions):
            row.append(action)
            row += due[index]
        lists.append(tuple(row))
    return replace(plan, actions=tuple(lists), passes=(*plan.passes, "reduce"))


def channel_of(rank: int, action: Action) -> Channel:
    """The channel of a SEND or RECV in the list of `rank`. Raises ScheduleError for other kinds."""
    payload = action.message.payload
    if action.kind not in MESSAGES or action.peer is None:
        raise ScheduleError(f"{action} carries no message")
    return (rank, action.peer, payload) if action.kind in SENDS else (action.peer, rank, payload)


def _runner(runners: dict[tuple[int, int], int], part: Action, stage: int, rank: int, index: int) -> int:
    if (stage, part.micro_batch) not in runners:
        raise ScheduleError(f"its neighbour F{stage}.{part.micro_batch} is run by no rank", rank, index, part)
    return runners[stage, part.micro_batch]


def _previous_compute(actions: tuple[Action, ...]) -> list[int]:
    """Index of the compute action before each index; the index itself where there is none."""
    previous: list[int] = []
    last: int | None = None
    for index, action in enumerate(actions):
        previous.append(index if last is None else last)
        if action.kind in COMPUTE:
            last = index
    return previous
