"""Proof that a plan is right, or the first action that is wrong.

Checked, in this order: that stages lie where the actions are; that each (stage, micro-batch) runs forward
once and backward once (B, or BI then BW), in order; that each message has both ends, after its producer and
before its consumer, and that both ends of a channel have one order; that no circle of waiting exists; that
each stage is reduced once, when its gradient is finished; that no rank holds more activations than allowed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ultrascale.pipeline.actions import (
    BACKWARDS,
    MESSAGES,
    SENDS,
    Action,
    Kind,
    Message,
    Plan,
    ScheduleError,
)
from ultrascale.pipeline.activations import live_activations
from ultrascale.pipeline.communication import Channel, channel_of
from ultrascale.pipeline.parameters import check_gathered, check_reductions
from ultrascale.pipeline.replay import Model, replay

Place = tuple[int, int]
"""(rank, index in its list)."""


def validate(plan: Plan, memory_bound: int | Sequence[int] | None = None, model: Model = "rendezvous") -> None:
    """Raises ScheduleError, naming rank, position and action, unless the plan is right.

    memory_bound is the number of activations (stage × micro-batch, held from the start of F to the end of B
    or BW) that each rank may hold: one number, or one per rank. `model` says how sends behave: see
    replay.Model.
    """
    _check_places(plan)
    runs = _check_once(plan)
    _check_order(plan, runs)
    if "communication" in plan.passes:
        _check_messages(plan, _due(plan, runs))
    for _ in replay(plan, model):
        pass
    if "reduce" in plan.passes:
        check_reductions(plan)
    check_gathered(plan)
    if memory_bound is not None:
        _check_memory(plan, memory_bound)


def _walk(plan: Plan) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(plan.actions):
        for index, action in enumerate(actions):
            yield rank, index, action


def _check_places(plan: Plan) -> None:
    if plan.micro_batches < 1:
        raise ScheduleError(f"a plan has at least one micro-batch, {plan.micro_batches} is none")
    for stage, ranks in enumerate(plan.placement):
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < plan.ranks for rank in ranks):
            raise ScheduleError(
                f"stage {stage} is placed on {ranks}: give one or more different ranks below {plan.ranks}"
            )
    for rank, index, action in _walk(plan):
        for part in action.parts or (action,):
            if wrong := _misplaced(plan, rank, part):
                raise ScheduleError(wrong, rank, index, action)
        if action.kind in MESSAGES and "communication" not in plan.passes:
            raise ScheduleError("a message in a plan that is said to have none (passes)", rank, index, action)
        if action.kind is Kind.REDUCE and "reduce" not in plan.passes:
            raise ScheduleError("a reduction in a plan that is said to have none (passes)", rank, index, action)
        if action.peer is not None and (action.peer == rank or not 0 <= action.peer < plan.ranks):
            message = f"peer {action.peer} is not another rank; there are ranks 0 to {plan.ranks - 1}"
            raise ScheduleError(message, rank, index, action)


def _misplaced(plan: Plan, rank: int, part: Action) -> str | None:
    placement, stage = plan.placement, part.stage
    if not 0 <= stage < len(placement):
        return f"stage {stage} does not exist; the plan has stages 0 to {plan.stages - 1}"
    if part.micro_batch >= plan.micro_batches:
        return f"micro-batch {part.micro_batch} does not exist; there are {plan.micro_batches}, from 0"
    if rank not in placement[stage]:
        return f"stage {stage} lies on rank {_ranks(placement[stage])}"
    if plan.forward_only and part.kind in BACKWARDS:
        return "a forward-only plan has no backward"
    return None


class _Runs:
    """Where each (stage, micro-batch) runs: forward, input gradient (B or BI), weight gradient (B or BW)."""

    def __init__(self) -> None:
        self.forward: dict[tuple[int, int], Place] = {}
        self.gradient: dict[tuple[int, int], Place] = {}
        self.weight: dict[tuple[int, int], Place] = {}

    def tables(self, part: Action) -> tuple[dict[tuple[int, int], Place], ...]:
        if part.kind is Kind.F:
            return (self.forward,)
        if part.kind is Kind.BI:
            return (self.gradient,)
        return (self.weight,) if part.kind is Kind.BW else (self.gradient, self.weight)


def _check_once(plan: Plan) -> _Runs:
    runs = _Runs()
    for rank, index, action in _walk(plan):
        for part in action.computes:
            key = (part.stage, part.micro_batch)
            for table in runs.tables(part):
                if key in table:
                    before = f"rank {table[key][0]} does it at action {table[key][1]}"
                    raise ScheduleError(f"{part} is done twice: {before}", rank, index, action)
            for table in runs.tables(part):
                table[key] = (rank, index)
    for stage, ranks in enumerate(plan.placement):
        for micro_batch in range(plan.micro_batches):
            key = (stage, micro_batch)
            if key not in runs.forward:
                raise _missing(plan, runs.gradient.get(key), Action(Kind.F, *key), ranks)
            if plan.forward_only:
                continue
            home = runs.forward[key][0]
            if key not in runs.gradient:
                kind = Kind.BI if key in runs.weight else Kind.B
                raise _missing(plan, runs.weight.get(key), Action(kind, *key), (home,))
            if key not in runs.weight:
                raise _missing(plan, None, Action(Kind.BW, *key), (home,))
    return runs


def _missing(plan: Plan, needed_at: Place | None, action: Action, ranks: Sequence[int]) -> ScheduleError:
    message = f"{action} is missing; rank {_ranks(ranks)} must run it"
    if needed_at is None:
        return ScheduleError(message, ranks[0] if len(ranks) == 1 else None, None, action)
    rank, index = needed_at
    return ScheduleError(f"needs {action}, which is missing", rank, index, plan.actions[rank][index])


def _check_order(plan: Plan, runs: _Runs) -> None:
    """What an action needs from its own rank must stand before it (not beside it, in an FB)."""
    last_stage = plan.stages - 1
    for rank, index, part in plan.computes():
        stage, micro_batch = part.stage, part.micro_batch
        if part.kind is Kind.F:
            # Its own stage's F is what it is itself; the neighbour's may be on another rank.
            own, neighbour = None, runs.forward[stage - 1, micro_batch] if stage > 0 else None
        elif part.kind is Kind.BW:
            own, neighbour = runs.gradient[stage, micro_batch], None
        else:
            own = runs.forward[stage, micro_batch]
            neighbour = runs.gradient[stage + 1, micro_batch] if stage < last_stage else None
        if own is not None and own[0] != rank:
            need = Kind.BI if part.kind is Kind.BW else Kind.F
            raise ScheduleError(f"its {need} is on rank {own[0]}", rank, index, plan.actions[rank][index])
        for place in (own, neighbour):
            if place is not None and place[0] == rank and place[1] >= index:
                raise ScheduleError(
                    f"needs {plan.actions[rank][place[1]]}, which stands at action {place[1]}, not before it",
                    rank,
                    index,
                    plan.actions[rank][index],
                )


Due = dict[int, tuple[Place, Place]]
"""Tag of each message that must be sent → where it is made, where it is needed."""


def _due(plan: Plan, runs: _Runs) -> Due:
    due: Due = {}
    width = plan.micro_batches
    for (stage, micro_batch), producer in runs.forward.items():
        if stage < plan.stages - 1 and (consumer := runs.forward[stage + 1, micro_batch])[0] != producer[0]:
            due[Message("activation", stage, micro_batch).tag(width)] = (producer, consumer)
    for (stage, micro_batch), producer in runs.gradient.items():
        if stage > 0 and (consumer := runs.gradient[stage - 1, micro_batch])[0] != producer[0]:
            due[Message("gradient", stage - 1, micro_batch).tag(width)] = (producer, consumer)
    return due


def _check_messages(plan: Plan, due: Due) -> None:
    """Each message that is due is sent once and received once, at the right moment, between the right ranks."""
    sent: dict[int, Place] = {}
    received: dict[int, Place] = {}
    channels: dict[Channel, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for rank, index, action in _walk(plan):
        if action.kind not in MESSAGES:
            continue
        tag, sends = action.tag(plan.micro_batches), action.kind in SENDS
        if wrong := _message_problem(plan, due.get(tag), rank, index, action):
            raise ScheduleError(wrong, rank, index, action)
        done = sent if sends else received
        if tag in done:
            raise ScheduleError(f"is done twice: also at action {done[tag][1]}", rank, index, action)
        done[tag] = (rank, index)
        channels[channel_of(rank, action)][0 if sends else 1].append(tag)
    for tag, (producer, consumer) in due.items():
        for place, table, what in ((producer, sent, "sends"), (consumer, received, "receives")):
            if tag not in table:
                action = plan.actions[place[0]][place[1]]
                boundary, micro_batch = divmod(tag // 2, plan.micro_batches)
                message = Message("gradient" if tag % 2 else "activation", boundary, micro_batch)
                raise ScheduleError(f"rank {place[0]} never {what} {message}", *place, action)
    for (source, target, payload), both in channels.items():
        for first, second in zip(*both, strict=True):
            if first != second:
                index = sent[first][1]
                to, at = received[second]
                raise ScheduleError(
                    f"receives in another order than rank {source} sends: next on the {payload} channel "
                    f"{source}→{target} is {plan.actions[source][index]} (action {index} of rank {source})",
                    to,
                    at,
                    plan.actions[to][at],
                )


def _message_problem(plan: Plan, ends: tuple[Place, Place] | None, rank: int, index: int, action: Action) -> str | None:
    """What is wrong with a message by itself: that it exists, its two ranks, its moment."""
    if ends is None:
        return "no such message is due: both stages are on one rank, or there is no such stage"
    sends = action.kind in SENDS
    own, other = ends if sends else ends[::-1]
    if rank != own[0]:
        return f"belongs on rank {own[0]}, which runs {plan.actions[own[0]][own[1]]}"
    if action.peer != other[0]:
        needs = plan.actions[other[0]][other[1]]
        return f"rank {action.peer} is the wrong peer: {needs} is on rank {other[0]}"
    if index < own[1] if sends else index > own[1]:
        side = "stands before" if sends else "comes after"
        need = "which makes what it sends" if sends else "which needs what it receives"
        return f"{side} {plan.actions[rank][own[1]]} (action {own[1]}), {need}"
    return None


def _check_memory(plan: Plan, memory_bound: int | Sequence[int]) -> None:
    bounds = [memory_bound] * plan.ranks if isinstance(memory_bound, int) else list(memory_bound)
    if len(bounds) != plan.ranks:
        raise ScheduleError(f"the memory bound is given for {len(bounds)} ranks, the plan has {plan.ranks}")
    for rank, bound in enumerate(bounds):
        for index, action, live in live_activations(plan, rank):
            if live > bound:
                raise ScheduleError(f"holds {live} activations, the bound is {bound}", rank, index, action)


def _ranks(ranks: Sequence[int]) -> str:
    return " or ".join(map(str, ranks))
