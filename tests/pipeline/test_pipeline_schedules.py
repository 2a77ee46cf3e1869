"""Schedules: valid for all sizes, and as long and as large as the published formulas and numbers say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_plans import costs_of, key_of, orders, plan_of, rows

from ultrascale.pipeline.actions import Kind, ScheduleError
from ultrascale.pipeline.communication import insert_communication, insert_reduce
from ultrascale.pipeline.costs import Costs, parse_costs
from ultrascale.pipeline.program import program
from ultrascale.pipeline.replay import Model
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import simulate
from ultrascale.pipeline.validate import validate

RANKS = st.integers(1, 16)
MICRO_BATCHES = st.integers(1, 64)
COST = st.integers(1, 9)  # integers: the simulated sums are exact
MODELS: tuple[Model, ...] = ("buffered", "rendezvous", "blocking")
TRAINING = [entry.name for entry in registry.SCHEDULES if entry.training]

# Their orders depend on the costs; the file has those for costs of one.
COST_AWARE = {"zb1p_auto", "zb2p_auto", "zb_v_auto", "v_half", "v_min", "1f1b_v"}


@pytest.mark.parametrize("name", [entry.name for entry in registry.SCHEDULES])
@settings(max_examples=15, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES)
def test_every_schedule_is_valid_under_every_model_of_sends(name: str, ranks: int, micro_batches: int) -> None:
    bound = registry.find(name).memory_bound(ranks, micro_batches, 1)
    plan = program(name, ranks, micro_batches)
    for model in MODELS:
        validate(plan, bound, model)


@pytest.mark.parametrize("name", TRAINING)
@settings(max_examples=40, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES, f=COST, bi=COST, bw=COST)
def test_makespan_and_bubbles_equal_the_closed_form(
    name: str, ranks: int, micro_batches: int, f: int, bi: int, bw: int
) -> None:
    result = simulate(registry.build(name, ranks, micro_batches), Costs(f, bi, bw))
    assert result.makespan == result.span == (micro_batches + ranks - 1) * (f + bi + bw)
    assert result.ideal == micro_batches * (f + bi + bw)
    assert result.bubble_fraction == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert result.bubble_over_ideal == pytest.approx((ranks - 1) / micro_batches)


@settings(max_examples=40, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES, f=COST, bi=COST, bw=COST, p2p=COST)
def test_gpipe_pays_each_hop_once_in_each_direction(
    ranks: int, micro_batches: int, f: int, bi: int, bw: int, p2p: int
) -> None:
    result = simulate(registry.build("gpipe", ranks, micro_batches), Costs(f, bi, bw, p2p))
    assert result.makespan == (micro_batches + ranks - 1) * (f + bi + bw) + 2 * (ranks - 1) * p2p


@settings(max_examples=40, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES)
def test_activations_in_flight_equal_the_published_numbers(ranks: int, micro_batches: int) -> None:
    expected = {
        "1f1b": tuple(min(micro_batches, ranks - rank) for rank in range(ranks)),
        "gpipe": (micro_batches,) * ranks,
        "evaluation": (1,) * ranks,
    }
    for entry in registry.SCHEDULES:
        result = simulate(registry.build(entry.name, ranks, micro_batches))
        assert result.peak_activations == expected[entry.name]
        assert entry.memory_bound(ranks, micro_batches, 1) == expected[entry.name]


@settings(max_examples=20, deadline=None)
@given(ranks=RANKS, micro_batches=MICRO_BATCHES, f=COST)
def test_evaluation_runs_forwards_only_and_fills_the_pipeline_once(ranks: int, micro_batches: int, f: int) -> None:
    plan = program("evaluation", ranks, micro_batches)
    assert {action.kind for row in plan.actions for action in row} <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert simulate(plan, Costs(F=f)).makespan == (micro_batches + ranks - 1) * f


@pytest.mark.parametrize("name", TRAINING)
def test_order_equals_the_reference_order(name: str) -> None:
    keys = [key for key in orders() if key.startswith(f"{name}|")]
    assert len(keys) == 2
    for key in keys:
        reference = plan_of(key)
        assert registry.build(name, reference.ranks, reference.micro_batches) == reference


def test_simulation_equals_every_reference_row() -> None:
    """Our own schedules on all rows, the published orders of the others on theirs: one IR for all of them."""
    compared = set()
    for row in rows():
        own = row["schedule"] in TRAINING
        if not own and row["schedule"] in COST_AWARE and not row["costs"].startswith("F=1;BI=1;BW=1;comm=0;"):
            continue
        if own:
            plan = registry.build(row["schedule"], int(row["P"]), int(row["M"]))
        else:
            plan = plan_of(key_of(row))
        result = simulate(plan, costs_of(row))
        where = f"{key_of(row)} {row['costs']}"
        # The file is rounded to six digits.
        assert result.makespan == pytest.approx(float(row["makespan"]), abs=1e-6), where
        assert result.span == pytest.approx(float(row["max_rank_span"]), abs=1e-6), where
        assert result.ideal == pytest.approx(float(row["ideal"]), abs=1e-6), where
        assert result.bubble_fraction == pytest.approx(float(row["bubble_frac"]), abs=1e-6), where
        assert result.span_bubble_fraction == pytest.approx(float(row["bubble_frac_span"]), abs=1e-6), where
        peaks = (result.peak_activations, result.peak_activations_input_gradient)
        for peak, rule in zip(peaks, ("B/W", "B/I"), strict=True):
            assert "|".join(map(str, peak)) == row[f"inflight_per_rank(release at {rule})"], where
        compared.add((row["schedule"], row["P"], row["M"], row["v"], row["costs"]))
    assert len(compared) >= 100


@pytest.mark.parametrize("key", sorted(orders()))
def test_published_orders_get_messages_and_reductions_that_hold(key: str) -> None:
    """Virtual stages, split backward, pairs, two copies; also where a channel is not sent in order of nee"""
    compute = plan_of(key)
    plan = insert_reduce(insert_communication(compute))
    validate(plan, simulate(compute).peak_activations)
    assert insert_communication(insert_reduce(compute)).actions == plan.actions
    assert plan.compute_only() == compute


def test_receive_is_posted_one_compute_action_before_the_one_that_needs_it() -> None:
    plan = program("1f1b", 4, 8)
    assert [str(action) for action in plan.actions[1][:12]] == [
        *("RECV_F1.0<0", "RECV_F1.1<0", "F1.0", "SEND_F1.0>2", "RECV_F1.2<0", "F1.1", "SEND_F1.1>2"),
        *("RECV_B1.0<2", "F1.2", "SEND_F1.2>2", "RECV_F1.3<0", "B1.0"),
    ]
    last = [str(action) for action in plan.actions[1][-4:]]
    assert last == ["SEND_B1.6>0", "B1.7", "SEND_B1.7>0", "REDUCE1"]


def test_unequal_stages_cost_what_the_slowest_one_makes_them_wait() -> None:
    result = simulate(registry.build("gpipe", 2, 3), Costs(F=(1, 2), BI=(1, 2), BW=(1, 2)))
    # Rank 1 starts at 1, works 3·2 + 3·4 without a gap; then rank 0 has its last B of 2 left.
    assert (result.makespan, result.busy) == (1 + 18 + 2, (9, 18))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("1f1", (2, 4), ["'1f1'", "did you mean 1f1b"]),
        ("gpip", (2, 4), ["'gpip'", "did you mean gpipe"]),
        ("1f1b", (0, 4), ["0 stages"]),
        ("1f1b", (2, 0), ["0 micro-batches"]),
        ("1f1b", (2, 4, 2), ["2 virtual stages", "1f1b", "use 1"]),
        ("1f1b", (100_000, 100_000), ["100000 stages", "100000 micro-batches"]),
    ],
)
def test_impossible_schedules_are_refused_with_what_would_do(
    name: str, arguments: tuple[int, ...], words: list[str]
) -> None:
    with pytest.raises(ScheduleError) as caught:
        registry.build(name, *arguments)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


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


def test_aliases_name_the_same_schedule() -> None:
    assert registry.find("AFAB") is registry.find("gpipe")
    assert registry.find("one-f-one-b") is registry.find("1f1b")
