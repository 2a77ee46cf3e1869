"""The validator: what is broken is refused by name, and what is not refused really runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_plans import orders, plan_of
from second_opinion import runs

from ultrascale.pipeline.actions import (
    COMPUTE,
    MESSAGES,
    Action,
    Kind,
    Plan,
    ScheduleError,
    parse_action,
)
from ultrascale.pipeline.communication import insert_communication
from ultrascale.pipeline.parameters import insert_reduce
from ultrascale.pipeline.program import program
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.validate import validate


def edited(plan: Plan, rank: int, actions: list[Action]) -> Plan:
    rows = list(plan.actions)
    rows[rank] = tuple(actions)
    return replace(plan, actions=tuple(rows))


def written(*rows: str, placement: tuple[tuple[int, ...], ...] | None = None, micro_batches: int = 1) -> Plan:
    """A plan of compute actions from its text."""
    actions = tuple(tuple(parse_action(word) for word in row.split()) for row in rows)
    return Plan("custom", placement or tuple((rank,) for rank in range(len(rows))), micro_batches, actions)


def where(plan: Plan, rank: int, text: str) -> int:
    return [str(action) for action in plan.actions[rank]].index(text)


def refused(plan: Plan, *words: str, **options: object) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(plan, **options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)
    return caught.value


PLANS = st.builds(program, st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 5), st.integers(1, 6))


def test_the_second_opinion_accepts_good_programs() -> None:
    for name in ("gpipe", "1f1b"):
        for ranks, micro_batches in ((1, 1), (2, 4), (4, 8), (5, 2)):
            assert runs(program(name, ranks, micro_batches))


@settings(max_examples=120, deadline=None)
@given(plan=PLANS, data=st.data())
def test_swapping_any_two_actions_is_refused_unless_the_program_still_runs(plan: Plan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.ranks - 1))
    row = list(plan.actions[rank])
    first = data.draw(st.integers(0, len(row) - 1))
    # Near ones: far ones are refused nearly always, and would prove less.
    second = data.draw(st.integers(max(0, first - 4), min(len(row) - 1, first + 4)))
    row[first], row[second] = row[second], row[first]
    broken = edited(plan, rank, row)
    try:
        validate(broken)
    except ScheduleError:
        assert not runs(broken)
    else:
        assert runs(broken)


@settings(max_examples=60, deadline=None)
@given(plan=PLANS, data=st.data(), twice=st.booleans())
def test_dropping_or_doubling_any_action_is_refused(plan: Plan, data: st.DataObject, twice: bool) -> None:
    rank = data.draw(st.integers(0, plan.ranks - 1))
    row = list(plan.actions[rank])
    index = data.draw(st.integers(0, len(row) - 1))
    action = row.pop(index)
    if twice:
        row[index:index] = [action, action]
    broken = edited(plan, rank, row)
    error = refused(broken)
    assert not runs(broken)
    if twice:
        assert (error.rank, error.index, error.action) == (rank, index + 1, action)
    else:
        kind = "B" if action.kind is Kind.SEND_B else "F" if action.kind is Kind.SEND_F else str(action.kind)
        assert error.rank == rank or action.kind in COMPUTE
        assert f"{kind.removeprefix('RECV_')}{action.stage}" in str(error)


@settings(max_examples=60, deadline=None)
@given(plan=PLANS.filter(lambda plan: plan.ranks > 2), data=st.data())
def test_a_wrong_peer_is_refused_and_named(plan: Plan, data: st.DataObject) -> None:
    places = [(r, i) for r, row in enumerate(plan.actions) for i, a in enumerate(row) if a.kind in MESSAGES]
    rank, index = data.draw(st.sampled_from(places))
    action = plan.actions[rank][index]
    peer = data.draw(st.integers(0, plan.ranks).filter(lambda peer: peer != action.peer))
    row = list(plan.actions[rank])
    row[index] = replace(action, peer=peer)
    error = refused(edited(plan, rank, row), f"peer {peer}" if peer in (rank, plan.ranks) else f"rank {peer}")
    assert (error.rank, error.index, error.action) == (rank, index, row[index])


def test_a_missing_forward_is_named_at_the_backward_that_needs_it() -> None:
    plan = written("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 B1.1", micro_batches=2)
    error = refused(plan, "rank 1, action 2 (B1.1)", "needs F1.1, which is missing")
    assert (error.rank, error.index, str(error.action)) == (1, 2, "B1.1")


def test_a_missing_backward_is_named_with_the_rank_that_must_run_it() -> None:
    refused(written("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1", micro_batches=2), "B1.1 is missing", "rank 1")
    refused(written("F0.0 BI0.0"), "BW0.0 is missing", "rank 0")
    refused(written("F0.0 BW0.0"), "needs BI0.0, which is missing")


def test_a_second_run_is_named_with_the_place_of_the_first() -> None:
    refused(written("F0.0 B0.0 B0.0"), "rank 0, action 2 (B0.0)", "rank 0 does it at action 1")
    refused(written("F0.0 B0.0 BW0.0"), "rank 0, action 2 (BW0.0)", "done twice")
    refused(written("FB(F0.0,B0.0)"), "needs FB(F0.0,B0.0), which stands at action 0, not before it")


def test_backward_before_its_forward_is_refused() -> None:
    refused(written("B0.0 F0.0"), "rank 0, action 0 (B0.0)", "needs F0.0, which stands at action 1")
    refused(written("F0.0 BW0.0 BI0.0"), "rank 0, action 1 (BW0.0)", "needs BI0.0")


def test_backward_on_another_copy_than_its_forward_is_refused() -> None:
    both = ((0, 1),)
    validate(written("F0.0 B0.0", "F0.1 B0.1", placement=both, micro_batches=2))
    refused(written("F0.0 B0.1", "F0.1 B0.0", placement=both, micro_batches=2), "its F is on rank 1")


def test_pytorchs_1f1b_of_the_last_rank_is_refused_at_its_first_wrong_action() -> None:
    """Schedule1F1B's order as data (torch 2.13) begins with micro-batch 1 there: 3F1 3B0 3F2 … 3F8 3B7."""
    plan = registry.build("1f1b", 4, 8)
    shifted = [replace(action, micro_batch=action.micro_batch + (action.kind is Kind.F)) for action in plan.actions[3]]
    error = refused(edited(plan, 3, shifted), "rank 3, action 14 (F3.8)", "micro-batch 8 does not exist")
    assert str(error.action) == "F3.8"
    within = [*shifted[:-2], parse_action("F3.0"), shifted[-1]]
    error = refused(edited(plan, 3, within), "rank 3, action 1 (B3.0)", "needs F3.0, which stands at action 14")
    assert str(error.action) == "B3.0"


def test_a_stage_is_reduced_once_or_for_every_micro_batch() -> None:
    once, each = program("1f1b", 2, 2), program("1f1b", 2, 2, zero_stage=2)
    row = list(once.actions[0])
    row.insert(row.index(parse_action("B0.1")), parse_action("REDUCE0.0"))
    refused(edited(once, 0, row), "(REDUCE0.0)", "not both")
    row = list(each.actions[0])
    assert [str(action) for action in row if action.kind is Kind.REDUCE] == ["REDUCE0.0", "REDUCE0.1"]
    row.remove(parse_action("REDUCE0.1"))
    refused(edited(each, 0, row), "micro-batch 1 of stage 0 is never reduced")
    row.insert(row.index(parse_action("B0.1")), parse_action("REDUCE0.1"))
    refused(edited(each, 0, row), "stands before B0.1")


def test_weights_are_gathered_around_all_that_reads_them() -> None:
    plan = program("zb_h1", 2, 3, zero_stage=3, gathered_once=True)
    for rank, actions in enumerate(plan.actions):
        found = [str(action) for action in actions if action.kind in (Kind.UNSHARD, Kind.RESHARD)]
        assert found == [f"UNSHARD{rank}", f"RESHARD{rank}"]
        last_use = max(index for index, action in enumerate(actions) if action.kind in (Kind.F, Kind.BI, Kind.B))
        assert actions[last_use + 1].kind is Kind.RESHARD  # weight gradients that come later need none
    row = list(plan.actions[0])
    reshard = row.pop(row.index(parse_action("RESHARD0")))
    refused(edited(plan, 0, row), "RESHARD0 is missing")
    refused(edited(plan, 0, [row[0], reshard, *row[1:]]), "not gathered")
    refused(edited(plan, 0, [row[0], row[0], *row[1:]]), "gathered already")


def test_places_that_do_not_exist_are_refused() -> None:
    refused(written("F1.0"), "stage 1 does not exist")
    refused(written("F0.1"), "micro-batch 1 does not exist")
    refused(written("F1.0 B1.0", "F0.0 B0.0"), "rank 0, action 0 (F1.0)", "stage 1 lies on rank 1")
    refused(written("F0.0 B0.0", placement=((2,),)), "stage 0 is placed on (2,)")
    refused(written("F0.0 B0.0", placement=((),)), "stage 0 is placed on ()")
    refused(replace(written("F0.0 B0.0"), forward_only=True), "forward-only")
    refused(replace(written("F0.0"), forward_only=True, micro_batches=0), "at least one micro-batch")


def test_messages_and_reductions_belong_to_plans_that_say_so() -> None:
    plan = program("1f1b", 2, 2)
    refused(replace(plan, passes=("reduce",)), "a message in a plan that is said to have none")
    refused(replace(plan, passes=("communication",)), "a reduction in a plan that is said to have none")
    refused(replace(plan.compute_only(), passes=("communication",)), "never sends")
    refused(replace(plan.compute_only(), passes=("reduce",)), "stage 0 is never reduced")


def test_swapped_receives_are_refused_at_the_first_one_out_of_order() -> None:
    plan = program("gpipe", 2, 4)
    row = list(plan.actions[1])
    first, second = where(plan, 1, "RECV_F1.0<0"), where(plan, 1, "RECV_F1.1<0")
    assert second == first + 1
    row[first], row[second] = row[second], row[first]
    error = refused(edited(plan, 1, row), "another order than rank 0 sends", "SEND_F0.0>1")
    assert (error.rank, error.index, str(error.action)) == (1, first, "RECV_F1.1<0")


def test_receives_keep_the_order_of_the_sends_where_it_is_not_the_order_of_need() -> None:
    compute = written("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.2 F1.0 F1.1 B1.1 B1.2 B1.0", micro_batches=3)
    plan = insert_reduce(insert_communication(compute))
    validate(plan)
    assert runs(plan)
    assert [str(action) for action in plan.actions[1][:4]] == [
        *("RECV_F1.0<0", "RECV_F1.1<0", "RECV_F1.2<0", "F1.2"),
    ]


def test_a_receive_after_what_needs_it_is_refused() -> None:
    plan = program("1f1b", 2, 2)
    row = list(plan.actions[1])
    row.remove(receive := parse_action("RECV_F1.1<0"))
    row.append(receive)
    refused(edited(plan, 1, row), "(RECV_F1.1<0)", "comes after F1.1", "which needs what it receives")


def test_a_send_before_what_makes_it_is_refused() -> None:
    plan = program("1f1b", 2, 2)
    row = list(plan.actions[0])
    row.remove(send := parse_action("SEND_F0.1>1"))
    row.insert(0, send)
    refused(edited(plan, 0, row), "rank 0, action 0 (SEND_F0.1>1)", "stands before F0.1", "which makes what")


def test_a_circle_of_waiting_is_printed_from_its_lowest_rank() -> None:
    # Rank 0 wants the gradient of 0 before it runs the forward of 1; rank 1 wants both forwards first.
    plan = written("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", micro_batches=2)
    for broken in (plan, insert_communication(plan)):
        error = refused(broken, "a circle of waiting", "rank 0 stands at B0.0", "rank 1 stands at F1.1")
        assert (error.rank, str(error.action)) == (0, "B0.0")


def test_blocking_sends_can_stand_still_where_posted_ones_do_not() -> None:
    plan = program("1f1b", 2, 4)
    for rank, late, before in ((0, "RECV_B0.0<1", "B0.0"), (1, "RECV_F1.1<0", "F1.1")):
        row = list(plan.actions[rank])
        row.remove(parse_action(late))
        row.insert(row.index(parse_action(before)), parse_action(late))
        plan = edited(plan, rank, row)
    validate(plan, model="rendezvous")
    refused(plan, "a circle of waiting under blocking sends", model="blocking")


def test_an_early_or_missing_reduction_is_refused() -> None:
    plan = program("1f1b", 2, 2)
    row = list(plan.actions[0])
    row.remove(reduce := parse_action("REDUCE0"))
    refused(edited(plan, 0, row), "stage 0 is never reduced")
    row.insert(row.index(parse_action("B0.1")), reduce)
    refused(edited(plan, 0, row), "(REDUCE0)", "stands before B0.1")


def test_holders_of_two_copies_reduce_them_in_one_order() -> None:
    plan = insert_reduce(insert_communication(plan_of("dualpipe|P=2|M=4|v=1")))
    validate(plan)
    row = list(plan.actions[1])
    assert [str(action) for action in row[-2:]] == ["REDUCE0", "REDUCE1"]
    refused(edited(plan, 1, [*row[:-2], row[-1], row[-2]]), "rank 1", "(REDUCE1)", "in the order [0, 1]")


def test_more_activations_than_the_bound_are_refused_at_the_forward_that_is_too_much() -> None:
    plan = registry.build("gpipe", 2, 4)
    validate(plan, 4)
    error = refused(plan, "rank 0, action 2 (F0.2)", "holds 3 activations, the bound is 2", memory_bound=2)
    assert error.index == 2
    refused(plan, "rank 1, action 3 (F1.3)", memory_bound=(4, 3))
    refused(plan, "given for 3 ranks, the plan has 2", memory_bound=(4, 4, 4))


def test_passes_are_put_in_once_and_only_into_whole_plans() -> None:
    plan = program("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="messages already"):
        insert_communication(plan)
    with pytest.raises(ScheduleError, match="reductions already"):
        insert_reduce(plan)
    with pytest.raises(ScheduleError, match=r"F1\.0 is run by no rank"):
        insert_communication(written("F0.0 B0.0", ""))
    with pytest.raises(ScheduleError, match="nothing on rank 0 needs"):
        insert_communication(written("F0.0", "F1.0 B1.0"))
    with pytest.raises(ScheduleError, match="stage 0 has no B or BW"):
        insert_reduce(written("F0.0"))


@pytest.mark.parametrize("key", sorted(orders()))
def test_published_orders_with_one_action_lost_are_refused(key: str) -> None:
    plan = plan_of(key)
    for rank, row in enumerate(plan.actions):
        refused(edited(plan, rank, list(row[:-1])), "missing")
