"""Good schedules of every kind, broken in every way: what no longer runs is refused, with rank and action named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_plans import FIXED
from second_opinion import runs

from ultrascale.pipeline.actions import (
    COMPUTE,
    MESSAGES,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Plan,
    ScheduleError,
    pair,
)
from ultrascale.pipeline.program import program
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.validate import validate

Rows = list[list[Action]]
Place = tuple[int, int]
"""(rank, index)"""

SIZES = ((1, 1), (1, 3), (2, 1), (2, 4), (2, 5), (3, 2), (3, 6), (4, 8))


@cache
def good() -> tuple[Plan, ...]:
    """Programs of every schedule, and of every number of virtual stages that is worth it."""
    plans = []
    for name in FIXED:
        for ranks, micro_batches in SIZES:
            for virtual in (1, 2, 3) if registry.find(name).adjustable else (None,):
                try:
                    plans.append(program(name, ranks, micro_batches, virtual))
                except ScheduleError:
                    assert name.startswith("dualpipe")  # the others take any size
    return tuple(plans)


def places(rows: Rows, wanted: Callable[[Action], bool]) -> list[Place]:
    return [(rank, index) for rank, row in enumerate(rows) for index, action in enumerate(row) if wanted(action)]


def any_action(action: Action) -> bool:
    return True


def drop(rows: Rows, choose: random.Random) -> None:
    rank, index = choose.choice(places(rows, any_action))
    del rows[rank][index]


def double(rows: Rows, choose: random.Random) -> None:
    rank, index = choose.choice(places(rows, any_action))
    rows[rank].insert(choose.randrange(len(rows[rank]) + 1), rows[rank][index])


def swap(rows: Rows, choose: random.Random) -> None:
    """Near ones: far ones are refused nearly always, and would prove less."""
    rank, index = choose.choice(places(rows, any_action))
    row = rows[rank]
    other = choose.randrange(max(0, index - 4), min(len(row), index + 5))
    row[index], row[other] = row[other], row[index]


def move(rows: Rows, choose: random.Random) -> None:
    """To another rank, or elsewhere on a single one."""
    rank, index = choose.choice(places(rows, any_action))
    action = rows[rank].pop(index)
    row = rows[choose.choice([other for other in range(len(rows)) if other != rank] or [0])]
    row.insert(choose.randrange(len(row) + 1), action)


def renumber(rows: Rows, choose: random.Random) -> None:
    """Another micro-batch, there or not."""
    rank, index = choose.choice(places(rows, lambda action: action.kind is not Kind.REDUCE))
    rows[rank][index] = _with(rows[rank][index], choose, "micro_batch", choose.randrange(10))


def restage(rows: Rows, choose: random.Random) -> None:
    """Another stage, there or not."""
    rank, index = choose.choice(places(rows, any_action))
    rows[rank][index] = _with(rows[rank][index], choose, "stage", choose.randrange(10))


def _with(action: Action, choose: random.Random, field: str, value: int) -> Action:
    if not action.parts:
        return replace(action, **{field: value})  # type: ignore[arg-type]
    parts = list(action.parts)
    which = choose.randrange(2)
    parts[which] = replace(parts[which], **{field: value})  # type: ignore[arg-type]
    return pair(*parts)


def weight_first(rows: Rows, choose: random.Random) -> None:
    """A BW before its BI."""
    rank, index = choose.choice(places(rows, lambda action: action.kind is Kind.BW))
    row = rows[rank]
    weight = row.pop(index)
    before = next(i for i, a in enumerate(row) for part in a.computes if part == replace(weight, kind=Kind.BI))
    row.insert(choose.randrange(before + 1), weight)


def whole_beside_halves(rows: Rows, choose: random.Random) -> None:
    """A B in place of a BI, whose BW is still there; or a BW behind a B."""
    rank, index = choose.choice(places(rows, lambda action: action.kind in (Kind.B, Kind.BI)))
    action = rows[rank][index]
    if action.kind is Kind.BI:
        rows[rank][index] = replace(action, kind=Kind.B)
    else:
        rows[rank].insert(index + 1, replace(action, kind=Kind.BW))


def half_alone(rows: Rows, choose: random.Random) -> None:
    """A BI in place of a B, without a BW."""
    rank, index = choose.choice(places(rows, lambda action: action.kind is Kind.B))
    rows[rank][index] = replace(rows[rank][index], kind=Kind.BI)


def split(rows: Rows, choose: random.Random) -> None:
    """BI and BW in place of B: nothing is wrong with it, if its results are sent and reduced behind both or not."""
    rank, index = choose.choice(places(rows, lambda action: action.kind is Kind.B))
    whole = rows[rank][index]
    rows[rank][index : index + 1] = [replace(whole, kind=Kind.BI), replace(whole, kind=Kind.BW)]


def wrong_peer(rows: Rows, choose: random.Random) -> None:
    rank, index = choose.choice(places(rows, lambda action: action.kind in MESSAGES))
    rows[rank][index] = replace(rows[rank][index], peer=choose.randrange(len(rows) + 1))


def reorder_messages(rows: Rows, choose: random.Random) -> None:
    """Two messages of one kind, one after the other in their list."""
    kind = choose.choice((Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B))
    first = choose.choice(places(rows, lambda action: action.kind is kind))
    row = rows[first[0]]
    others = [i for i, action in enumerate(row) if action.kind is kind and i > first[1]] or [first[1]]
    row[first[1]], row[others[0]] = row[others[0]], row[first[1]]


def pair_up(rows: Rows, choose: random.Random) -> None:
    """An F and the backward behind it, or before it, as one FB."""
    rank, index = choose.choice(places(rows, lambda action: action.kind is Kind.F))
    row = rows[rank]
    near = [i for i in range(max(0, index - 4), min(len(row), index + 5)) if row[i].kind in (Kind.B, Kind.BI)]
    other = choose.choice(near)
    both = pair(row[index], row[other])
    for place in sorted((index, other), reverse=True):
        del row[place]
    row.insert(min(index, other), both)


MUTATIONS = (
    *(drop, double, swap, move, renumber, restage, weight_first, whole_beside_halves, half_alone, split, wrong_peer),
    *(reorder_messages, pair_up),
)


def mutants(mutate: Callable[[Rows, random.Random], None], choose: random.Random, plans: int) -> Iterator[Plan]:
    for plan in choose.sample(good(), plans):
        rows = [list(row) for row in plan.actions]
        try:
            mutate(rows, choose)
        except (IndexError, ScheduleError):  # it has nothing of that kind
            continue
        yield replace(plan, actions=tuple(map(tuple, rows)))


@pytest.mark.parametrize("mutate", MUTATIONS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_broken_schedule_is_refused_if_and_only_if_it_no_longer_runs(
    mutate: Callable[[Rows, random.Random], None], seed: int
) -> None:
    _refused_if_broken(mutate, seed, 4)


@pytest.mark.prove
@pytest.mark.parametrize("mutate", MUTATIONS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_broken_schedule_is_refused_if_and_only_if_it_no_longer_runs_at_length(
    mutate: Callable[[Rows, random.Random], None], seed: int
) -> None:
    _refused_if_broken(mutate, seed, 12)


def refusal(plan: Plan) -> ScheduleError | None:
    try:
        validate(plan)
    except ScheduleError as error:
        return error
    return None


def _refused_if_broken(mutate: Callable[[Rows, random.Random], None], seed: int, plans: int) -> None:
    for plan in mutants(mutate, random.Random(seed), plans):
        error = refusal(plan)
        if error is None:
            assert runs(plan), f"{plan.name} does not run, and is not refused"
            continue
        assert not runs(plan), f"{plan.name} runs, and is refused: {error}"
        assert error.action is not None, str(error)
        assert "rank" in str(error)
        assert str(error.action) in str(error)
        if error.index is not None:
            assert error.rank is not None
            there = plan.actions[error.rank][error.index]
            assert error.action in (there, *there.computes)


def test_the_second_opinion_takes_good_programs_and_every_mutation_makes_bad_ones() -> None:
    """Or the property above would hold for nothing."""
    assert all(map(runs, good()))
    assert {plan.name for plan in good()} == {*FIXED}
    kinds = {action.kind for plan in good() for row in plan.actions for action in row}
    assert kinds == COMPUTE | SENDS | RECEIVES | {Kind.REDUCE}
    choose = random.Random(1)
    for mutate in MUTATIONS:
        broken = [not runs(plan) for plan in mutants(mutate, choose, 60)]
        assert any(broken) != (mutate is split), mutate.__name__
