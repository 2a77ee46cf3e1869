"""Memory of a sent message is freed only when it has certainly arrived, and soon."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_plans import orders, plan_of

from ultrascale.pipeline import releases as releases_module
from ultrascale.pipeline.actions import COMPUTE, SENDS, Action, Kind, Message, Plan
from ultrascale.pipeline.communication import insert_communication
from ultrascale.pipeline.parameters import insert_reduce
from ultrascale.pipeline.program import program
from ultrascale.pipeline.releases import releases
from ultrascale.pipeline.validate import validate

PUBLISHED = [key for key in orders() if plan_of(key).ranks <= 8]


def published(key: str) -> Plan:
    plan = insert_reduce(insert_communication(plan_of(key)))
    validate(plan)
    return plan


def consumed(action: Action) -> list[Message]:
    """Messages that an action works with, if they come from another rank."""
    messages = []
    for part in action.computes:
        if part.kind is Kind.F:
            messages.append(Message("activation", part.stage - 1, part.micro_batch))
        elif part.kind is not Kind.BW:
            messages.append(Message("gradient", part.stage, part.micro_batch))
    return messages


def run(plan: Plan, choose: random.Random, freed: list[dict[int, tuple[int, ...]]]) -> list[int]:
    """Runs all lists, at each moment one action of any rank that can go on; the most sends open, by rank.

    A compute action waits for its messages to have been sent; nothing else waits. Asserts that a send is freed once,
    after it was made, and after its receiver has run what consumes it.
    """
    crossing = {action.message for row in plan.actions for action in row if action.kind in SENDS}
    sent: set[Message] = set()
    used: set[Message] = set()
    position = [0] * plan.ranks
    open_sends: list[dict[int, Message]] = [{} for _ in range(plan.ranks)]
    most = [0] * plan.ranks
    while True:
        able = [
            rank
            for rank, row in enumerate(plan.actions)
            if position[rank] < len(row) and all(m in sent for m in consumed(row[position[rank]]) if m in crossing)
        ]
        if not able:
            break
        # Long runs of one rank and single steps: both ends of what timing can do.
        rank = choose.choice(able)
        index, action = position[rank], plan.actions[rank][position[rank]]
        position[rank] += 1
        if action.kind in SENDS:
            sent.add(action.message)
            open_sends[rank][index] = action.message
        used.update(m for m in consumed(action) if m in crossing)
        for freed_index in freed[rank].get(index, ()):
            message = open_sends[rank].pop(freed_index)
            assert message in used, f"rank {rank} frees {message} at {action}, and its receiver has not used it"
        most[rank] = max(most[rank], len(open_sends[rank]))
    assert position == [len(row) for row in plan.actions]
    return most


def slowest_first(slow: int) -> random.Random:
    """A chooser that lets one rank go on only when no other can: the worst case for what is known of it."""

    class _Chooser(random.Random):
        def choice(self, able: list[int]) -> int:  # type: ignore[override]
            others = [rank for rank in able if rank != slow]
            return super().choice(others or able)

    return _Chooser(slow)


def run_with_every_rank_slow(plans: list[Plan]) -> None:
    for plan in plans:
        freed = releases(plan)
        for rank in range(plan.ranks):
            run(plan, slowest_first(rank), freed)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["1f1b", "gpipe", "evaluation"]), st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32))
def test_a_freed_send_has_been_used_in_every_order_that_the_plan_allows(
    name: str, ranks: int, micro_batches: int, seed: int
) -> None:
    plan = program(name, ranks, micro_batches)
    freed = releases(plan)
    run(plan, random.Random(seed), freed)
    for rank in range(ranks):
        run(plan, slowest_first(rank), freed)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PUBLISHED), st.integers(0, 2**32))
def test_it_holds_for_the_published_schedules(key: str, seed: int) -> None:
    """Interleaved, zero-bubble and two-way ones: FB, BI and BW, several stages a rank and two copies of a stage."""
    plan = published(key)
    freed = releases(plan)
    run(plan, random.Random(seed), freed)
    run(plan, slowest_first(seed % plan.ranks), freed)


def test_published_schedules_of_every_kind_are_tried() -> None:
    kinds = {part.kind for key in PUBLISHED for _, _, part in plan_of(key).computes()}
    assert {Kind.F, Kind.B, Kind.BI, Kind.BW} <= kinds
    assert any(action.kind is Kind.FB for key in PUBLISHED for row in plan_of(key).actions for action in row)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "evaluation"])
def test_every_send_is_freed_at_most_once_and_after_it_was_made(name: str) -> None:
    for ranks, micro_batches in [(1, 3), (2, 1), (3, 5), (4, 8)]:
        plan = program(name, ranks, micro_batches)
        for row, freed in zip(plan.actions, releases(plan), strict=True):
            all_freed = [send for sends in freed.values() for send in sends]
            assert len(all_freed) == len(set(all_freed))
            for index, sends in freed.items():
                assert row[index].kind in COMPUTE
                assert all(send < index and row[send].kind in SENDS for send in sends)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_1f1b_keeps_about_as_many_sends_as_there_are_stages(ranks: int) -> None:
    """However many micro-batches there are, and whichever rank is slow."""
    for micro_batches in (1, ranks, 2 * ranks, 40):
        plan = program("1f1b", ranks, micro_batches)
        freed = releases(plan)
        for chooser in (random.Random(0), *(slowest_first(rank) for rank in range(ranks))):
            most = run(plan, chooser, freed)
            assert max(most) <= ranks + 1, (micro_batches, most)


def test_1f1b_leaves_only_its_last_sends_for_the_end_of_the_step() -> None:
    plan = program("1f1b", 4, 40)
    for row, freed in zip(plan.actions, releases(plan), strict=True):
        made = sum(action.kind in SENDS for action in row)
        kept = made - sum(len(sends) for sends in freed.values())
        assert kept <= 5


def test_freeing_at_once_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send freed by the action behind it, as if sending were arriving."""
    plan = program("1f1b", 3, 4)
    at_once = []
    for row in plan.actions:
        sends = [index for index, action in enumerate(row) if action.kind in SENDS]
        at_once.append({index + 1: (index,) for index in sends if index + 1 < len(row)})
    monkeypatch.setitem(globals(), "releases", lambda plan: at_once)
    with pytest.raises(AssertionError, match="its receiver has not used it"):
        run_with_every_rank_slow([plan])


def test_knowing_one_action_too_much_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock says how many actions are done, not which one is under way."""
    monkeypatch.setattr(
        releases_module, "_arrived", lambda message, used_at, known: known[used_at[message][0]] >= used_at[message][1]
    )
    plans = [program(*case) for case in [("1f1b", 4, 8), ("gpipe", 3, 4), ("1f1b", 2, 5)]] + [
        published(key) for key in PUBLISHED
    ]
    with pytest.raises(AssertionError, match="its receiver has not used it"):
        run_with_every_rank_slow(plans)


def test_a_message_nobody_uses_is_never_freed_early() -> None:
    """It is awaited at the end of the step."""
    plan = program("1f1b", 2, 3)
    unread = tuple(a for a in plan.actions[1] if not (a.kind is Kind.F and a.micro_batch == 0))
    freed = releases(replace(plan, actions=(plan.actions[0], unread)))
    first_send = next(i for i, a in enumerate(plan.actions[0]) if a.kind in SENDS)
    assert first_send not in [send for sends in freed[0].values() for send in sends]
