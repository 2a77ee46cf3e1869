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
    WHOLE_STEP,
    Action,
    Kind,
    Message,
    Plan,
    ScheduleError,
)
from ultrascale.pipeline.activations import live_activations
from ultrascale.pipeline.communication import Channel, channel_of
from ultrascale.pipeline.replay import Model, last_backwards, replay

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
        _check_messages(plan, runs)
    for _ in replay(plan, model):
        pass
    if "reduce" in plan.passes:
        _check_reductions(plan)
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

        def wrong(message: str, at: tuple[int, int, Action] = (rank, index, action)) -> ScheduleError:
            return ScheduleError(message, *at)

        for part in action.computes or (action,):
            if not 0 <= part.stage < plan.stages:
                raise wrong(f"stage {part.stage} does not exist; the plan has stages 0 to {plan.stages - 1}")
            if part.micro_batch >= plan.micro_batches:
                raise wrong(f"micro-batch {part.micro_batch} does not exist; there are {plan.micro_batches}, from 0")
            if rank not in plan.placement[part.stage]:
                raise wrong(f"stage {part.stage} lies on rank {_ranks(plan.placement[part.stage])}")
            if plan.forward_only and part.kind in BACKWARDS:
                raise wrong("a forward-only plan has no backward")
        if action.kind in MESSAGES and "communication" not in plan.passes:
            raise wrong("a message in a plan that is said to have none (passes)")
        if action.kind is Kind.REDUCE and "reduce" not in plan.passes:
            raise wrong("a reduction in a plan that is said to have none (passes)")
        if action.peer is not None and (action.peer == rank or not 0 <= action.peer < plan.ranks):
            raise wrong(f"peer {action.peer} is not another rank; there are ranks 0 to {plan.ranks - 1}")


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
    for rank, index, part in plan.computes():
        key = (part.stage, part.micro_batch)
        needs: list[tuple[Action, Place]] = []
        if part.kind is Kind.F:
            if part.stage > 0:
                place = runs.forward[part.stage - 1, part.micro_batch]
                needs.append((Action(Kind.F, part.stage - 1, part.micro_batch), place))
        elif part.kind is Kind.BW:
            needs.append((Action(Kind.BI, *key), runs.gradient[key]))
        else:
            needs.append((Action(Kind.F, *key), runs.forward[key]))
            if part.stage < plan.stages - 1:
                place = runs.gradient[part.stage + 1, part.micro_batch]
                needs.append((Action(Kind.B, part.stage + 1, part.micro_batch), place))
        for need, place in needs:
            own = need.stage == part.stage
            if own and place[0] != rank:
                raise ScheduleError(f"its {need.kind} is on rank {place[0]}", rank, index, plan.actions[rank][index])
            if place[0] == rank and place[1] >= index:
                raise ScheduleError(
                    f"needs {plan.actions[rank][place[1]]}, which stands at action {place[1]}, not before it",
                    rank,
                    index,
                    plan.actions[rank][index],
                )


def _check_messages(plan: Plan, runs: _Runs) -> None:
    due: dict[Message, tuple[Place, Place]] = {}  # → (producer, consumer)
    for (stage, micro_batch), producer in runs.forward.items():
        if stage < plan.stages - 1 and runs.forward[stage + 1, micro_batch][0] != producer[0]:
            due[Message("activation", stage, micro_batch)] = (producer, runs.forward[stage + 1, micro_batch])
    for (stage, micro_batch), producer in runs.gradient.items():
        if stage > 0 and runs.gradient[stage - 1, micro_batch][0] != producer[0]:
            due[Message("gradient", stage - 1, micro_batch)] = (
                producer,
                runs.gradient[stage - 1, micro_batch],
            )

    sent: dict[Message, int] = {}
    received: dict[Message, int] = {}
    channels: dict[Channel, tuple[list[Place], list[Place]]] = defaultdict(lambda: ([], []))
    for rank, index, action in _walk(plan):
        if action.kind not in MESSAGES:
            continue
        message, sends = action.message, action.kind in SENDS
        if message not in due:
            raise ScheduleError(
                "no such message is due: both stages are on one rank, or there is no such stage",
                rank,
                index,
                action,
            )
        own, other = due[message] if sends else due[message][::-1]
        if rank != own[0]:
            raise ScheduleError(
                f"belongs on rank {own[0]}, which runs {plan.actions[own[0]][own[1]]}", rank, index, action
            )
        if action.peer != other[0]:
            needs = plan.actions[other[0]][other[1]]
            raise ScheduleError(
                f"rank {action.peer} is the wrong peer: {needs} is on rank {other[0]}", rank, index, action
            )
        if message in (done := sent if sends else received):
            raise ScheduleError(f"is done twice: also at action {done[message]}", rank, index, action)
        if index < own[1] if sends else index > own[1]:
            side = "stands before" if sends else "comes after"
            need = "which makes what it sends" if sends else "which needs what it receives"
            raise ScheduleError(f"{side} {plan.actions[rank][own[1]]} (action {own[1]}), {need}", rank, index, action)
        done[message] = index
        channels[channel_of(rank, action)][0 if sends else 1].append((rank, index))
    for message, (producer, consumer) in due.items():
        for place, table, what in ((producer, sent, "sends"), (consumer, received, "receives")):
            if message not in table:
                action = plan.actions[place[0]][place[1]]
                raise ScheduleError(f"rank {place[0]} never {what} {message}", *place, action)
    for (source, target, payload), (sends_, receives) in channels.items():
        for send, receive in zip(sends_, receives, strict=True):
            send_action, action = plan.actions[send[0]][send[1]], plan.actions[receive[0]][receive[1]]
            if send_action.message != action.message:
                raise ScheduleError(
                    f"receives in another order than rank {source} sends: next on the {payload} channel "
                    f"{source}→{target} is {send_action} (action {send[1]} of rank {source})",
                    *receive,
                    action,
                )


def _check_reductions(plan: Plan) -> None:
    shared: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for rank, actions in enumerate(plan.actions):
        last = last_backwards(plan, rank)
        reduced: dict[int, int] = {}
        for index, action in enumerate(actions):
            if action.kind is not Kind.REDUCE or action.micro_batch != WHOLE_STEP:
                continue
            if action.stage in reduced:
                raise ScheduleError(f"is done twice: also at action {reduced[action.stage]}", rank, index, action)
            if last.get(action.stage, -1) > index:
                late = actions[last[action.stage]]
                raise ScheduleError(
                    f"stands before {late} (action {last[action.stage]}), which adds to it",
                    rank,
                    index,
                    action,
                )
            reduced[action.stage] = index
        for stage in plan.stages_of(rank):
            if stage not in reduced:
                raise ScheduleError(f"stage {stage} is never reduced", rank, None, Action(Kind.REDUCE, stage))
        # Holders of two copies meet in their reductions.
        for holders in {plan.placement[stage] for stage in reduced if len(plan.placement[stage]) > 1}:
            order = [stage for stage in reduced if set(plan.placement[stage]) == set(holders)]
            key = tuple(sorted(holders))
            first, wanted = shared.setdefault(key, (rank, order))
            if order != wanted:
                stage = next(own for own, theirs in zip(order, wanted, strict=False) if own != theirs)
                raise ScheduleError(
                    f"rank {first} reduces the stages that both hold in the order {wanted}, this one {order}",
                    rank,
                    reduced[stage],
                    actions[reduced[stage]],
                )


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
