"""Schedules: valid for all sizes, as long and as large as the closed forms say, and refused where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_plans import FIXED

from ultrascale.pipeline.actions import Kind, ScheduleError
from ultrascale.pipeline.costs import Costs, parse_costs
from ultrascale.pipeline.program import evaluation_program, program, prove
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.simulate import simulate
from ultrascale.pipeline.validate import validate

GROUPED = ("interleaved_1f1b", "grouped_interleaved", "interleaved_1f1b_a2a_overlap")
BREADTH_FIRST = ("looped_bfs", "looped_bfs_ascending")
RANKS = st.integers(1, 16)
MICRO_BATCHES = st.integers(1, 64)
VIRTUAL = st.integers(1, 4)
COST = st.integers(1, 9)  # integers: the simulated sums are exact
COSTS = st.tuples(COST, COST, COST)
"""F, BI, BW"""

# In `make prove` each property is tried at all sizes; by default on fewer examples of up to half as many micro-batches.
AT_LENGTH = [
    pytest.param(32, 8, id="short"),
    pytest.param(64, 300, id="long", marks=pytest.mark.prove),
]


@st.composite
def requests(draw: st.DrawFn, name: str, most_micro_batches: int) -> Request:
    """A request of any size that the schedule takes, with and without a group size."""
    entry = registry.find(name)
    ranks = draw(st.integers(1, 8)) * 2 if name == "dualpipe" else draw(RANKS)
    least = 2 * ranks if name.startswith("dualpipe") else 1
    micro_batches = draw(st.integers(least, max(least, most_micro_batches)))
    if name == "dualpipe":
        micro_batches += micro_batches % 2
    virtual = draw(VIRTUAL) if entry.adjustable else None
    group_size = None
    if "group_size" in entry.options:
        group_size = draw(st.none() | st.integers(min(ranks, micro_batches), 2 * micro_batches))
    return registry.request(entry, ranks, micro_batches, virtual, group_size=group_size)


def repeat(examples: int, *given_: Any, **strategies: Any) -> Callable[[Callable[..., None]], None]:
    """Runs a property on so many examples, at once."""

    def run(check: Callable[..., None]) -> None:
        settings(max_examples=examples, deadline=None)(given(*given_, **strategies)(check))()

    return run


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize(("most", "examples"), AT_LENGTH)
def test_every_schedule_is_valid_in_exactly_the_memory_that_it_says(name: str, most: int, examples: int) -> None:
    entry = registry.find(name)

    @repeat(examples, requests(name, most))
    def check(request: Request) -> None:
        compute, bound = entry.build(request), entry.memory_bound(request)
        validate(compute, bound)
        plan = prove(entry, request)  # with messages and reductions, under rendezvous sends
        assert plan.passes == ("communication", "reduce")
        assert plan.compute_only() == compute
        assert simulate(compute).peak_activations == bound


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize(("most", "examples"), AT_LENGTH)
def test_no_schedule_has_a_larger_bubble_than_1f1b(name: str, most: int, examples: int) -> None:
    """Whatever F, BI and BW are, as long as messages are free. A virtual stage costs 1/V of what a rank does."""

    @repeat(examples, requests(name, most), COSTS)
    def check(request: Request, costs: tuple[int, int, int]) -> None:
        result = simulate(registry.find(name).build(request), Costs(*costs))
        work = request.virtual_stages * sum(costs)
        assert result.ideal == request.micro_batches * work
        assert result.span <= result.makespan <= (request.micro_batches + request.ranks - 1) * work


def makespan(name: str, ranks: int, micro_batches: int, costs: Costs, virtual: int | None = None) -> float:
    return simulate(registry.build(name, ranks, micro_batches, virtual), costs).makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b_eager"])
@settings(max_examples=15, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES, costs=COSTS)
def test_makespan_and_bubbles_equal_the_closed_form(
    name: str, ranks: int, micro_batches: int, costs: tuple[int, int, int]
) -> None:
    result = simulate(registry.build(name, ranks, micro_batches), Costs(*costs))
    assert result.makespan == result.span == (micro_batches + ranks - 1) * sum(costs)
    assert result.ideal == micro_batches * sum(costs)
    assert result.bubble_fraction == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert result.bubble_over_ideal == pytest.approx((ranks - 1) / micro_batches)


@settings(max_examples=30, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES, costs=COSTS, p2p=COST)
def test_gpipe_pays_each_hop_once_in_each_direction(
    ranks: int, micro_batches: int, costs: tuple[int, int, int], p2p: int
) -> None:
    wanted = (micro_batches + ranks - 1) * sum(costs) + 2 * (ranks - 1) * p2p
    assert makespan("gpipe", ranks, micro_batches, Costs(*costs, p2p)) == wanted


@settings(max_examples=20, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES, costs=COSTS, data=st.data())
def test_eager_1f1b_hides_latency_up_to_half_of_a_turn(
    ranks: int, micro_batches: int, costs: tuple[int, int, int], data: st.DataObject
) -> None:
    p2p = data.draw(st.integers(0, sum(costs) // 2))
    wanted = (micro_batches + ranks - 1) * sum(costs) + 2 * (ranks - 1) * p2p
    assert makespan("1f1b_eager", ranks, micro_batches, Costs(*costs, p2p)) == wanted


@settings(max_examples=20, deadline=None)
@given(ranks=RANKS, rounds=st.integers(1, 4), costs=COSTS)
def test_1f1b_pays_a_little_latency_again_in_every_round(ranks: int, rounds: int, costs: tuple[int, int, int]) -> None:
    micro_batches = rounds * ranks
    f, bi, bw = (100 * cost for cost in costs)
    hops = 2 * (ranks - 1) * rounds + 2 * (ranks - 2) if ranks > 1 else 0
    wanted = (micro_batches + ranks - 1) * (f + bi + bw) + hops
    assert makespan("1f1b", ranks, micro_batches, Costs(f, bi, bw, 1)) == wanted


@pytest.mark.parametrize("name", [*GROUPED, *BREADTH_FIRST])
@settings(max_examples=10, deadline=None)
@given(data=st.data(), costs=COSTS)
def test_looped_stages_divide_the_bubble_by_their_number(
    name: str, data: st.DataObject, costs: tuple[int, int, int]
) -> None:
    """With P micro-batches or more, divisible or not, in groups of any size."""
    request = data.draw(requests(name, 40).filter(lambda request: request.micro_batches >= request.ranks))
    turns = request.virtual_stages * request.micro_batches + request.ranks - 1
    assert simulate(registry.find(name).build(request), Costs(*costs)).makespan == turns * sum(costs)


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(2, 8), rounds=st.integers(1, 4), virtual=VIRTUAL, costs=COSTS, name=st.sampled_from(GROUPED))
def test_a_little_latency_costs_a_loop_its_hops_and_larger_groups_hide_it(
    ranks: int, rounds: int, virtual: int, costs: tuple[int, int, int], name: str
) -> None:
    f, bi, bw = (1000 * cost for cost in costs)
    little, micro_batches = Costs(f, bi, bw, 1), rounds * ranks
    free = (virtual * micro_batches + ranks - 1) * (f + bi + bw)
    in_ranks = makespan("interleaved_1f1b", ranks, micro_batches, little, virtual)
    assert in_ranks == free + 2 * (virtual * ranks - 1)
    assert makespan("grouped_interleaved_N=M", ranks, micro_batches, little, virtual) <= in_ranks
    more = micro_batches + 1
    for order in BREADTH_FIRST:
        wanted = free + virtual * (f + bi + bw) + 2 * (ranks - 1)
        assert makespan(order, ranks, more, little, virtual) == wanted


@pytest.mark.parametrize("name", ["zb_h1", "zb_h1_mds"])
@settings(max_examples=20, deadline=None)
@given(ranks=RANKS, more=st.integers(0, 40), costs=COSTS)
def test_zb_h1_equals_its_closed_form(name: str, ranks: int, more: int, costs: tuple[int, int, int]) -> None:
    f, bi, bw = costs
    micro_batches = ranks + more
    wanted = micro_batches * (f + bi + bw) + (ranks - 1) * max(bi, f + bi - min(bi, bw))
    assert makespan(name, ranks, micro_batches, Costs(*costs)) == wanted


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(1, 10), rounds=st.integers(1, 4), virtual=VIRTUAL, more=st.integers(0, 20), cost=COST)
def test_split_backwards_leave_only_the_fill_when_all_costs_are_equal(
    ranks: int, rounds: int, virtual: int, more: int, cost: int
) -> None:
    equal = Costs(cost, cost, cost)
    turns = virtual * rounds * ranks
    assert makespan("interleaved_zb", ranks, rounds * ranks, equal, virtual) == (3 * turns + ranks - 1) * cost
    micro_batches = 2 * ranks - 1 + more
    result = simulate(registry.build("zb_v", ranks, micro_batches), equal)
    assert result.makespan == (6 * micro_batches + ranks - 1) * cost
    assert result.span == 6 * micro_batches * cost, "zero bubble, by the span of each rank"


@settings(max_examples=25, deadline=None)
@given(half=st.integers(1, 8), more=st.integers(0, 8), costs=COSTS, data=st.data())
def test_dualpipe_equals_its_longest_path_and_half_of_it_is_dualpipe_v(
    half: int, more: int, costs: tuple[int, int, int], data: st.DataObject
) -> None:
    """With F ≥ BI, and a pair that takes no longer than its parts and no less than either."""
    f, bi, bw = costs
    f = max(f, bi)
    together = data.draw(st.none() | st.integers(max(f, bi + bw), f + bi + bw))
    micro_batches = 2 * (2 * half + more)
    paths = (
        3 * half * f + (half + 2) * (bi + bw),
        3 * half * f + (2 * half + 1) * bi + 3 * bw,
        2 * half * f + 3 * half * bi + 3 * bw,
    )
    pairs = (micro_batches - half - 2) * (f + bi + bw if together is None else together)
    both = Costs(f, bi, bw, 0, together)
    assert makespan("dualpipe", 2 * half, micro_batches, both) == max(paths) + pairs
    assert makespan("dualpipe_v", half, micro_batches // 2, both) == max(paths) + pairs


@settings(max_examples=20, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES, f=COST)
def test_evaluation_runs_forwards_only_and_fills_the_pipeline_once(ranks: int, micro_batches: int, f: int) -> None:
    plan = program("evaluation", ranks, micro_batches)
    assert {action.kind for row in plan.actions for action in row} <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert simulate(plan, Costs(F=f)).makespan == (micro_batches + ranks - 1) * f


@pytest.mark.parametrize("name", FIXED)
@settings(max_examples=6, deadline=None)
@given(data=st.data(), micro_batches=st.integers(1, 20))
def test_evaluation_runs_over_the_stages_of_any_schedule_with_any_number_of_micro_batches(
    name: str, data: st.DataObject, micro_batches: int
) -> None:
    request = data.draw(requests(name, 16))
    training = registry.find(name).build(request)
    plan = evaluation_program(training, micro_batches)  # valid under blocking sends, too
    assert plan.placement == training.placement
    busiest = max(sum(action.kind is Kind.F for action in row) for row in plan.actions)
    work = request.virtual_stages * micro_batches
    if name == "dualpipe":
        assert busiest <= micro_batches + 1, "each direction has half of them"
        work = busiest
    assert busiest == work
    # No rank stands still but for the way there and back, once round for each virtual stage.
    assert simulate(plan, Costs()).makespan <= work + request.virtual_stages * (request.ranks - 1) + request.stages


def test_bidirectional_copies_run_one_half_of_the_micro_batches_each() -> None:
    plan = registry.build("dualpipe", 4, 10)
    assert plan.placement == ((0, 3), (1, 2), (2, 1), (3, 0))
    for rank, _, part in plan.computes():
        assert rank == plan.placement[part.stage][part.micro_batch >= 5]
    halves = evaluation_program(plan)
    for rank, _, part in halves.computes():
        assert rank == plan.placement[part.stage][part.micro_batch >= 5]


def test_receive_is_posted_one_compute_action_before_the_one_that_needs_it() -> None:
    plan = program("1f1b", 4, 8)
    assert [str(action) for action in plan.actions[1][:12]] == [
        *("RECV_F1.0<0", "RECV_F1.1<0", "F1.0", "SEND_F1.0>2", "RECV_F1.2<0", "F1.1", "SEND_F1.1>2"),
        *("RECV_B1.0<2", "F1.2", "SEND_F1.2>2", "RECV_F1.3<0", "B1.0"),
    ]
    last = [str(action) for action in plan.actions[1][-4:]]
    assert last == ["SEND_B1.6>0", "B1.7", "SEND_B1.7>0", "REDUCE1"]


def test_a_pair_sends_both_of_its_results_and_the_turn_of_a_v_sends_none() -> None:
    plan = program("dualpipe_v", 2, 4)
    row = [str(action) for action in plan.actions[1]]
    pair = row.index("FB(F2.2,B1.0)")
    assert row[pair + 1 : pair + 3] == ["SEND_F2.2>0", "SEND_B1.0>0"]
    assert not [text for text in row if text.startswith(("SEND_F1", "RECV_F2", "SEND_B2", "RECV_B1"))]


def test_two_ranks_in_a_loop_tell_their_messages_apart() -> None:
    """Both boundaries 0 and 2 go from rank 0 to rank 1, on one channel in one order."""
    plan = program("interleaved_1f1b", 2, 2)
    sends = [str(action) for action in plan.actions[0] if action.kind is Kind.SEND_F]
    receives = [str(action) for action in plan.actions[1] if action.kind is Kind.RECV_F]
    assert sends == ["SEND_F0.0>1", "SEND_F0.1>1", "SEND_F2.0>1", "SEND_F2.1>1"]
    assert receives == ["RECV_F1.0<0", "RECV_F1.1<0", "RECV_F3.0<0", "RECV_F3.1<0"]


def test_a_stage_is_reduced_behind_its_own_last_gradient_and_copies_at_the_end() -> None:
    looped = [str(action) for action in program("looped_bfs", 2, 2).actions[0]]
    assert looped[looped.index("REDUCE2") - 2 : looped.index("REDUCE2")] == ["B2.0", "SEND_B2.0>1"]
    assert looped[-1] == "REDUCE0"
    for row in program("dualpipe", 4, 8).actions:
        assert [action.kind for action in row[-2:]] == [Kind.REDUCE] * 2
        assert row[-2].stage < row[-1].stage
    late = [str(action) for action in program("zb_h1", 2, 3).actions[1]]
    assert late[-2:] == ["BW1.2", "REDUCE1"]


def test_unequal_stages_cost_what_the_slowest_one_makes_them_wait() -> None:
    result = simulate(registry.build("gpipe", 2, 3), Costs(F=(1, 2), BI=(1, 2), BW=(1, 2)))
    # Rank 1 starts at 1, works 3·2 + 3·4 without a gap; then rank 0 has its last B of 2 left.
    assert (result.makespan, result.busy) == (1 + 18 + 2, (9, 18))


@pytest.mark.parametrize(
    ("micro_batches", "group_size", "sizes"),
    [
        (8, None, [4, 4]),
        (9, None, [5, 4]),
        (15, None, [5, 5, 5]),
        (3, None, [3]),
        (10, 6, [6, 4]),
        (9, 6, [9]),
        (8, 100, [8]),
    ],
)
def test_groups_are_of_the_wanted_size_and_never_smaller_than_the_ranks(
    micro_batches: int, group_size: int | None, sizes: list[int]
) -> None:
    """What is left over fills the pipeline, or goes to the others."""
    plan = registry.build("interleaved_1f1b", 4, micro_batches, 2, group_size=group_size)
    forwards = [part.stage for rank, _, part in plan.computes() if rank == 3 and part.kind is Kind.F]
    found, last = [], 7
    for stage in forwards:
        if stage == 3:
            found += [0] if last == 7 else []
            found[-1] += 1
        last = stage
    assert found == sizes


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("1f1", (2, 4), ["'1f1'", "did you mean 1f1b"]),
        ("gpip", (2, 4), ["'gpip'", "did you mean gpipe"]),
        ("dualpipe_w", (2, 4), ["did you mean dualpipe"]),
        ("1f1b", (0, 4), ["0 ranks"]),
        ("1f1b", (2, 0), ["0 micro-batches"]),
        ("1f1b", (2, 4, 2), ["2 virtual stages", "1f1b", "use 1"]),
        ("zb_v", (2, 4, 3), ["3 virtual stages", "zb_v", "use 2"]),
        ("interleaved_1f1b", (2, 4, 0), ["0 virtual stages", "1 or more"]),
        ("1f1b", (100_000, 100_000), ["100000 ranks", "100000 micro-batches"]),
        ("1f1b", (2, 4, None, None, 4), ["group_size=4", "1f1b", "takes no option"]),
        ("interleaved_1f1b", (2, 4, None, None, None, 9), ["activation_limit=9", "it takes group_size"]),
        ("interleaved_1f1b", (4, 8, None, None, 3), ["group_size=3", "4 ranks", "use 4 to 8"]),
        ("interleaved_1f1b", (4, 8, None, None, -1), ["group_size=-1", "1 or more"]),
        ("grouped_interleaved_N=Q", (4, 8), ["N=Q", "2P"]),
        ("grouped_interleaved_N=0P", (4, 8), ["N=0P"]),
        ("grouped_interleaved_N=3", (4, 8), ["group_size=3", "use 4 to 8"]),
        ("grouped_interleaved_N=2P", (4, 8, None, None, 4), ["group_size=4", "grouped_interleaved_N=2P"]),
        ("1f1b_N=2P", (4, 8), ["'1f1b_N=2P' is not a schedule"]),
        ("dualpipe", (4, 6), ["2 micro-batches for each of its 4 ranks", "6 are too few", "use 8 or more"]),
        ("dualpipe", (4, 9), ["9 is odd", "use 8 or 10"]),
        ("dualpipe", (3, 8), ["3 is odd", "use 2 or 4, or dualpipe_v"]),
        ("dualpipe", (1, 8), ["1 is odd", "use 2"]),
        ("dualpipe_v", (4, 7), ["7 are too few", "use 8 or more"]),
    ],
)
def test_impossible_schedules_are_refused_with_what_would_do(
    name: str, arguments: tuple[Any, ...], words: list[str]
) -> None:
    with pytest.raises(ScheduleError) as caught:
        registry.build(name, *arguments)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F=-1", ["F=-1", "negative"]),
        ("F=nan", ["F=nan", "finite"]),
        ("BW=inf", ["BW=inf"]),
        ("f=1", ["'f'", "did you mean F?"]),
        ("F=1,F=2", ["F is given twice"]),
        ("F", ["'F'"]),
        ("P2P=x", ["P2P=x"]),
    ],
)
def test_costs_that_are_none_are_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_costs(text)
    for word in words:
        assert word in str(caught.value)


def test_aliases_and_group_sizes_name_the_same_schedules() -> None:
    assert registry.find("AFAB") is registry.find("gpipe")
    assert registry.find("one-f-one-b") is registry.find("1f1b")
    assert registry.find("llama3") is registry.find("grouped_interleaved")
    assert registry.find("eager_1f1b") is registry.find("1f1b_eager")
    whole = registry.build("grouped_interleaved_N=M", 4, 12, 3)
    assert whole.name == "grouped_interleaved_N=M"
    for name, size in (("grouped-interleaved_n=12", None), ("llama3_N=3p", None), ("interleaved", 12)):
        assert registry.build(name, 4, 12, 3, group_size=size).actions == whole.actions
    assert registry.build("llama3", 4, 12).actions == registry.build("interleaved_1f1b", 4, 12, group_size=8).actions
