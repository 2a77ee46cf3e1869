"""The simulator: what waits, what is held, and why the step takes as long as it does."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_plans import orders, plan_of

from ultrascale.pipeline.actions import Action, Kind, Plan, ScheduleError, backward, forward
from ultrascale.pipeline.activations import peak_activations, peak_bytes
from ultrascale.pipeline.communication import insert_communication
from ultrascale.pipeline.costs import Costs, at, parse_costs
from ultrascale.pipeline.program import program
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import simulate
from ultrascale.pipeline.timeline import dependencies

KEYS = sorted(orders())
COST = st.integers(0, 9)


def costs_for(draw: st.DrawFn, plan: Plan) -> Costs:
    """Integers, so that times are exact; per stage, or one for all."""

    def some() -> st.SearchStrategy[int | tuple[int, ...]]:
        return st.one_of(COST, st.tuples(*[COST] * plan.stages))

    pairs = draw(st.one_of(st.none(), some()))
    return Costs(draw(some()), draw(some()), draw(some()), draw(COST), pairs, draw(some()))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Costs]:
    plan = plan_of(draw(st.sampled_from(KEYS)))
    return plan, costs_for(draw, plan)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_critical_path_explains_the_whole_makespan(case: tuple[Plan, Costs]) -> None:
    plan, costs = case
    result = simulate(plan, costs)
    path = result.critical_path
    causes = {(id(source), id(target)) for source, target in dependencies(result.events)}
    causes |= {(id(first), id(second)) for row in result.events for first, second in pairwise(row)}
    length: float = 0
    for first, second in pairwise(path):
        assert (id(first), id(second)) in causes
        hop = costs.hop if first.rank != second.rank else 0
        assert first.end + hop == second.start
        length += hop
    assert path[0].start == 0
    assert length + sum(costs.of(event.action) for event in path) == result.makespan


@settings(max_examples=60, deadline=None)
@given(cases())
def test_idle_time_is_split_without_rest_and_exposed_p2p_is_in_it(case: tuple[Plan, Costs]) -> None:
    plan, costs = case
    result = simulate(plan, costs)
    needs: dict[int, list[float]] = {}
    for source, target in dependencies(result.events):
        needs.setdefault(id(target), []).append(source.end)
    for rank, idle in enumerate(result.idle):
        assert sum(idle) == result.makespan - result.busy[rank]
        assert min(idle) >= 0
        # Counted again, from the events: what an action waits after its last input has left.
        waited, before = 0.0, 0.0
        for event in result.events[rank]:
            waited += event.start - max([before, *needs.get(id(event), [])])
            before = event.end
        assert result.exposed[rank] == waited <= idle.fill + idle.steady
        if costs.P2P == 0:
            assert waited == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 16), COST, st.integers(1, 9), st.integers(1, 4))
def test_gpipe_shows_each_message_of_its_fill_and_nothing_else(p: int, m: int, f: int, nbytes: int, p2p: int) -> None:
    costs = Costs(f, 1, 1, p2p, MESSAGE=nbytes, BANDWIDTH=3)
    result = simulate(registry.build("gpipe", p, m), costs)
    hop = p2p + Fraction(nbytes, 3)
    assert costs.hop == hop
    assert result.makespan == (m + p - 1) * (f + 2) + 2 * (p - 1) * hop
    assert result.exposed == tuple(hop * ((rank > 0) + (rank < p - 1)) for rank in range(p))


def test_times_stay_exact() -> None:
    third = Fraction(1, 3)
    result = simulate(registry.build("1f1b", 5, 7), Costs(third, third, Fraction(1, 7)))
    assert result.makespan == 11 * (2 * third + Fraction(1, 7))
    assert simulate(registry.build("1f1b", 5, 7), Costs(10**30, 1, 1)).makespan == 11 * (10**30 + 2)


def test_recomputation_is_part_of_each_backward_but_not_of_weight_gradients() -> None:
    costs = Costs(F=2, BI=3, BW=4, R=(5, 6))
    assert [costs.of(Action(kind, 1, 0)) for kind in (Kind.F, Kind.B, Kind.BI, Kind.BW)] == [2, 13, 9, 4]
    plan = registry.build("1f1b", 4, 8)
    assert simulate(plan, Costs(1, 1, 1, R=1)).makespan == 11 * 4


def test_a_pair_costs_by_the_stage_of_its_forward() -> None:
    costs = Costs(F=1, BI=1, BW=2, FB=(10, 20), R=(0, 3))
    whole = Action(Kind.FB, 0, 0, parts=(forward(0, 0), backward(1, 1)))
    split = Action(Kind.FB, 1, 0, parts=(forward(1, 0), Action(Kind.BI, 0, 1)))
    assert costs.of(whole) == 10 + 3
    assert costs.of(split) == 20 - 2
    assert Costs(F=1, BI=1, BW=2, R=1).of(whole) == 1 + 3 + 1


def held_at(plan: Plan, costs: Costs, rank: int, index: int) -> float:
    """Bytes held while action `index` runs, counted again: every holder by its first and last index."""
    row = insert_communication(plan).actions[rank]
    place = {(part.kind, part.stage, part.micro_batch): i for i, action in enumerate(row) for part in action.computes}
    total: float = 0
    for (kind, stage, number), first in place.items():
        if kind is Kind.F:
            end = place.get((Kind.B, stage, number), place.get((Kind.BI, stage, number)))
            assert end is not None
            total += at(costs.ACTIVATION, stage) * (first <= index <= end)
        if kind is Kind.BI:
            total += at(costs.held, stage) * (first < index <= place[Kind.BW, stage, number])
    for i, action in enumerate(row):
        if action.kind is Kind.RECV_F:
            total += costs.MESSAGE * (i <= index < place[Kind.F, action.stage, action.micro_batch])
        if action.kind is Kind.RECV_B:
            kind = Kind.B if (Kind.B, action.stage, action.micro_batch) in place else Kind.BI
            total += costs.MESSAGE * (i <= index <= place[kind, action.stage, action.micro_batch])
    return total


@pytest.mark.parametrize("key", [key for key in KEYS if "P=2|" in key])
def test_peak_bytes_are_the_most_that_is_held_at_any_action(key: str) -> None:
    plan = plan_of(key)
    sizes = tuple(10 * (stage + 1) for stage in range(plan.stages))
    costs = Costs(ACTIVATION=sizes, HELD=tuple(size // 3 for size in sizes), MESSAGE=7)
    rows = insert_communication(plan).actions
    wanted = tuple(max(held_at(plan, costs, rank, i) for i in range(len(row))) for rank, row in enumerate(rows))
    assert peak_bytes(plan, costs) == peak_bytes(insert_communication(plan), costs) == wanted


@pytest.mark.parametrize("key", KEYS)
def test_bytes_of_one_count_activations_under_both_rules(key: str) -> None:
    plan = plan_of(key)
    assert peak_bytes(plan, Costs(ACTIVATION=1)) == peak_activations(plan, "BW")
    assert peak_bytes(plan, Costs(ACTIVATION=1, HELD=0)) == peak_activations(plan, "BI")
    assert peak_bytes(plan, Costs()) == (0,) * plan.ranks


def test_an_evaluation_holds_one_activation_and_what_it_receives() -> None:
    plan = program("evaluation", 3, 8)
    assert peak_bytes(plan, Costs(ACTIVATION=10)) == (10,) * 3
    # While one is computed, the receive of the next is posted.
    assert peak_bytes(plan, Costs(ACTIVATION=10, MESSAGE=4)) == (10, 14, 14)


PROVE = [pytest.param(name, marks=pytest.mark.prove) for name in ("interleaved_1f1b", "zb_v", "dualpipe_v")]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", *PROVE])
def test_64_ranks_and_1024_micro_batches_take_less_than_two_seconds(name: str) -> None:
    plan = registry.build(name, 64, 1024)
    start = time.process_time()
    result = simulate(plan, Costs(1, 1, 1, 0.1))
    assert time.process_time() - start < 2
    assert sum(map(len, result.events)) >= 2 * 64 * 1024


def test_a_plan_that_stands_still_is_refused_with_the_circle() -> None:
    rows = ((backward(0, 0), forward(0, 0)), (forward(1, 0), backward(1, 0)))
    with pytest.raises(ScheduleError, match=r"B0\.0"):
        simulate(Plan("broken", ((0,), (1,)), 1, rows))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F=1:2:x", "F=1:2:x"),
        ("P2P=1:2", "gives 2 numbers, but a link has one"),
        ("BANDWIDTH=0", "BANDWIDTH=0 lets no message through"),
        ("HELD=-1", "HELD=-1.0 is negative"),
        ("ACTIVATION=1:nan", "ACTIVATION=nan"),
        ("BW=1:2,BW=3", "given twice, as 1:2 and 3"),
    ],
)
def test_costs_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_costs(text)
    assert words in str(caught.value)


def test_costs_per_stage_are_read_and_counted() -> None:
    costs = parse_costs("F=1:2:3,P2P=0.5", Costs(BI=7))
    assert (costs.F, costs.BI, costs.P2P) == ((1.0, 2.0, 3.0), 7, 0.5)
    with pytest.raises(ScheduleError, match="F is given for 3 stages, the plan has 2"):
        simulate(registry.build("1f1b", 2, 2), costs)
