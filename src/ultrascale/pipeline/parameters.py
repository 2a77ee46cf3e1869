"""What a plan does with parameters: when gradients are reduced, and how long gathered weights stay."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ultrascale.pipeline.actions import SENDS, WHOLE_STEP, Action, Kind, Plan, ScheduleError
from ultrascale.pipeline.replay import last_backwards


def insert_reduce(plan: Plan, every_micro_batch: bool = False) -> Plan:
    """The plan with a REDUCE where gradients are finished; a forward-only plan stays as it is.

    Once per stage that a rank holds, after the stage's last B or BW (`REDUCE0`); or, where gradients are passed on as
    they come (ZeRO stages 2 and 3), after every one (`REDUCE0.3`). In both cases behind the sends of that action, which
    others wait for. The stages of a schedule with two copies that are reduced once come last, in the order of the
    model: the holders of the copies meet in these reductions, and must come to them in the same order.

    Raises ScheduleError when a stage has no backward on a rank that holds it, or reductions are there already.
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
            if not every_micro_batch:
                index = last[stage] if len(plan.placement[stage]) == 1 else max(last.values())
                due[_behind_sends(actions, index)].append(Action(Kind.REDUCE, stage))
        for index, action in enumerate(actions) if every_micro_batch else ():
            for part in action.computes:
                if part.kind in (Kind.B, Kind.BW):
                    reduce = Action(Kind.REDUCE, part.stage, part.micro_batch)
                    due[_behind_sends(actions, index)].append(reduce)
        lists.append(_with(actions, due))
    return replace(plan, actions=tuple(lists), passes=(*plan.passes, "reduce"))


def keep_gathered(plan: Plan) -> Plan:
    """The plan with each stage's weights gathered once a step: UNSHARD before its first use, RESHARD behind its last.

    Without these the weights of a unit are gathered for each pass through it, and dropped behind it (ZeRO stage 3).
    A deferred weight gradient (BW) needs no weights.
    """
    lists = []
    for rank, actions in enumerate(plan.actions):
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, action in enumerate(actions):
            for part in action.computes:
                if part.kind is not Kind.BW:
                    first.setdefault(part.stage, index)
                    last[part.stage] = index
        row: list[Action] = []
        for index, action in enumerate(actions):
            row += [Action(Kind.UNSHARD, stage) for stage in plan.stages_of(rank) if first.get(stage) == index]
            row.append(action)
            row += [Action(Kind.RESHARD, stage) for stage in plan.stages_of(rank) if last.get(stage) == index]
        lists.append(tuple(row))
    return replace(plan, actions=tuple(lists))


def check_gathered(plan: Plan) -> None:
    """Raises ScheduleError unless UNSHARD and RESHARD come in pairs, each around all that reads the stage's weights."""
    for rank, actions in enumerate(plan.actions):
        if not any(action.kind is Kind.UNSHARD for action in actions):
            continue
        gathered: set[int] = set()
        for index, action in enumerate(actions):
            if action.kind is Kind.UNSHARD:
                if action.stage in gathered:
                    raise ScheduleError(f"stage {action.stage} is gathered already", rank, index, action)
                gathered.add(action.stage)
            elif action.kind is Kind.RESHARD:
                if action.stage not in gathered:
                    raise ScheduleError(f"stage {action.stage} is not gathered here", rank, index, action)
                gathered.remove(action.stage)
            for part in action.computes:
                if part.kind is not Kind.BW and part.stage not in gathered:
                    raise ScheduleError(f"needs the weights of stage {part.stage}, not gathered", rank, index, action)
        if gathered:
            raise ScheduleError(f"stage {min(gathered)} stays gathered; RESHARD{min(gathered)} is missing", rank)


def check_reductions(plan: Plan) -> None:
    """Raises ScheduleError unless each stage, or each micro-batch of it, is reduced once, behind its gradient."""
    shared: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for rank, actions in enumerate(plan.actions):
        done = _reductions(plan, rank, actions)
        once = {stage: index for (stage, micro_batch), index in done.items() if micro_batch == WHOLE_STEP}
        # Holders of two copies meet in their reductions.
        for holders in {plan.placement[stage] for stage in once if len(plan.placement[stage]) > 1}:
            order = [stage for stage in once if set(plan.placement[stage]) == set(holders)]
            first, wanted = shared.setdefault(tuple(sorted(holders)), (rank, order))
            if order != wanted:
                stage = next(own for own, theirs in zip(order, wanted, strict=False) if own != theirs)
                raise ScheduleError(
                    f"rank {first} reduces the stages that both hold in the order {wanted}, this one {order}",
                    rank,
                    once[stage],
                    actions[once[stage]],
                )


def _reductions(plan: Plan, rank: int, actions: tuple[Action, ...]) -> dict[tuple[int, int], int]:
    """(stage, micro-batch or WHOLE_STEP) → index of its REDUCE, in order; each checked."""
    last = last_backwards(plan, rank)
    made = {
        (part.stage, part.micro_batch): index
        for index, action in enumerate(actions)
        for part in action.computes
        if part.kind in (Kind.B, Kind.BW)
    }
    made |= {(stage, WHOLE_STEP): index for stage, index in last.items()}
    done: dict[tuple[int, int], int] = {}
    for index, action in enumerate(actions):
        if action.kind is not Kind.REDUCE:
            continue
        key = (action.stage, action.micro_batch)
        if key in done:
            raise ScheduleError(f"is done twice: also at action {done[key]}", rank, index, action)
        if key not in made:
            raise ScheduleError(f"rank {rank} makes no such gradient", rank, index, action)
        if made[key] > index:
            late = actions[made[key]]
            raise ScheduleError(f"stands before {late} (action {made[key]}), which adds to it", rank, index, action)
        done[key] = index
    each = WHOLE_STEP not in (micro_batch for _, micro_batch in done) and bool(done)
    for (stage, micro_batch), index in done.items():
        if (micro_batch != WHOLE_STEP) != each:
            message = f"stages are reduced once here (REDUCE{stage}) or for every micro-batch, not both"
            raise ScheduleError(message, rank, index, actions[index])
    for key in made:
        if (key[1] != WHOLE_STEP) == each and key not in done:
            what = f"micro-batch {key[1]} of stage {key[0]}" if each else f"stage {key[0]}"
            raise ScheduleError(f"{what} is never reduced", rank, None, Action(Kind.REDUCE, *key))
    return done


def _behind_sends(actions: tuple[Action, ...], index: int) -> int:
    while index + 1 < len(actions) and actions[index + 1].kind in SENDS:
        index += 1
    return index


def _with(actions: tuple[Action, ...], due: dict[int, list[Action]]) -> tuple[Action, ...]:
    """The actions, each followed by what is due behind it."""
    row: list[Action] = []
    for index, action in enumerate(actions):
        row.append(action)
        if index in due:
            row += due[index]
    return tuple(row)
