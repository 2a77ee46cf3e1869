"""The published orders and numbers of every schedule with a fixed order, row by row."""

from __future__ import annotations

import pytest
from reference_plans import COST_AWARE, FIXED, costs_of, key_of, orders, plan_of, rows

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.communication import insert_communication
from ultrascale.pipeline.parameters import insert_reduce
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import Simulation, simulate
from ultrascale.pipeline.validate import validate

NAMES = {name for row in rows() if (name := row["schedule"]).partition("_N=")[0] in FIXED}


def sizes(key: str) -> tuple[str, int, int, int]:
    """Schedule, ranks, micro-batches and virtual stages of a key of the orders."""
    name, *numbers = key.split("|")
    ranks, micro_batches, virtual = (int(text.partition("=")[2]) for text in numbers)
    return name, ranks, micro_batches, virtual


def assert_equal(result: Simulation, row: dict[str, str]) -> None:
    """What the file says of a row, rounded to six digits there."""
    where = f"{key_of(row)} {row['costs']}"
    for value, column in (
        (result.makespan, "makespan"),
        (result.span, "max_rank_span"),
        (result.ideal, "ideal"),
        (result.bubble_fraction, "bubble_frac"),
        (result.span_bubble_fraction, "bubble_frac_span"),
    ):
        assert value == pytest.approx(float(row[column]), abs=1e-6), f"{where}: {column}"
    peaks = (result.peak_activations, result.peak_activations_input_gradient)
    for peak, rule in zip(peaks, ("B/W", "B/I"), strict=True):
        assert "|".join(map(str, peak)) == row[f"inflight_per_rank(release at {rule})"], f"{where}: {rule}"


def test_every_fixed_schedule_of_the_file_is_ours() -> None:
    """1f1b_eager is in no file; grouped_interleaved is in it by two sizes of its groups."""
    assert {name.partition("_N=")[0] for name in NAMES} == {*FIXED} - {"1f1b_eager"}
    assert {row["schedule"] for row in rows()} == {*NAMES, *COST_AWARE}


@pytest.mark.parametrize("key", [key for key in orders() if sizes(key)[0] in NAMES])
def test_order_equals_the_published_order_action_for_action(key: str) -> None:
    name, ranks, micro_batches, virtual = sizes(key)
    plan, published = registry.build(name, ranks, micro_batches, virtual), plan_of(key)
    assert plan.name == name
    assert plan.actions == published.actions
    # Who holds which copy is said, and not in the published lists.
    assert [sorted(holders) for holders in plan.placement] == [list(holders) for holders in published.placement]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_simulation_equals_every_row_of_the_file(name: str) -> None:
    plans: dict[str, Plan] = {}
    compared = 0
    for row in rows():
        if row["schedule"] != name:
            continue
        ranks, micro_batches, virtual = (int(row[column]) for column in ("P", "M", "v"))
        if (key := key_of(row)) not in plans:
            plans[key] = registry.build(name, ranks, micro_batches, virtual)
        result = simulate(plans[key], costs_of(row))
        assert_equal(result, row)
        entry = registry.find(name)
        request = registry.request(entry, ranks, micro_batches, virtual)
        assert entry.memory_bound(request) == result.peak_activations
        compared += 1
    assert compared >= 16


def test_simulation_of_a_cost_aware_order_equals_the_row_that_it_was_made_for() -> None:
    compared = 0
    for row in rows():
        if (
            row["schedule"] in COST_AWARE
            and row["costs"].startswith("F=1;BI=1;BW=1;comm=0;")
            and key_of(row) in orders()
        ):
            assert_equal(simulate(plan_of(key_of(row)), costs_of(row)), row)
            compared += 1
    assert compared == 2 * len(COST_AWARE)


@pytest.mark.parametrize("key", sorted(orders()))
def test_published_orders_get_messages_and_reductions_that_hold(key: str) -> None:
    """Virtual stages, split backward, pairs, two copies; also where a channel is not sent in order of need."""
    compute = plan_of(key)
    plan = insert_reduce(insert_communication(compute))
    validate(plan, simulate(compute).peak_activations)
    assert insert_communication(insert_reduce(compute)).actions == plan.actions
    assert plan.compute_only() == compute
