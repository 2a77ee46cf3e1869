"""The balanced split: as good as the best of all splits, and what it is for known models."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.config.load import load
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config
from ultrascale.pipeline.balance import LayerCosts, Memory, Stages, balanced
from ultrascale.pipeline.check import check
from ultrascale.pipeline.layer_costs import (
    balance,
    balance_text,
    in_flight,
    layer_costs,
    refined,
    split_of,
    stage_costs,
)
from ultrascale.pipeline.partition import PartitionError, Split
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.schedules.placement import Placement, linear, loop, v_shape
from ultrascale.pipeline.simulate import simulate


def counts(split: Split) -> list[int]:
    return [len(stage.layers) for stage in split]


def best_of_all(stages: Stages) -> tuple[float, float] | None:
    """(slowest rank, slowest stage) of the best of all splits that fit, by trying each."""
    found = []
    for cuts in combinations(range(1, stages.layers), stages.stages - 1):
        split = [after - before for before, after in zip((0, *cuts), (*cuts, stages.layers), strict=True)]
        times, ranks, held = stages.loads(split)
        if max(held) <= stages.limit:
            found.append((max(ranks), max(times)))
    return min(found, default=None)


NUMBER = st.integers(1, 9)


@st.composite
def problems(draw: st.DrawFn) -> tuple[LayerCosts, Placement, Memory]:
    ranks = draw(st.integers(1, 3))
    placement, exact_for_any = draw(
        st.sampled_from(
            [(linear(ranks), True), (v_shape(ranks), True), (loop(ranks, 2), True), (loop(ranks, 3), False)]
        )
    )
    layers = len(placement) + draw(st.integers(0, 4))

    def per_layer() -> tuple[float, ...]:
        if not exact_for_any or draw(st.booleans()):
            return (draw(NUMBER),) * layers
        return draw(st.tuples(*[NUMBER] * layers))

    ends: dict[str, Any] = {
        "embedding": draw(NUMBER),
        "head": draw(st.integers(0, 30)),
        "embedding_bytes": draw(st.tuples(NUMBER, NUMBER)),
        "head_bytes": draw(st.tuples(NUMBER, NUMBER)),
    }
    costs = LayerCosts(per_layer(), parameter_bytes=per_layer(), activation_bytes=per_layer(), **ends)
    held = draw(st.tuples(*[st.integers(1, 4)] * len(placement)))
    return costs, placement, Memory(draw(st.none() | st.integers(20, 200)), held)


@settings(max_examples=80, deadline=None)
@given(problems())
def test_equals_the_best_of_all_splits(problem: tuple[LayerCosts, Placement, Memory]) -> None:
    costs, placement, memory = problem
    stages = Stages(costs, placement, memory)
    best = best_of_all(stages)
    if best is None:
        with pytest.raises(PartitionError, match=r"no split of .* fits into .* bytes per rank"):
            balanced(costs, placement, memory)
        return
    times, ranks, held = stages.loads(counts(balanced(costs, placement, memory)))
    assert (max(ranks), max(times)) == best
    assert max(held) <= stages.limit


def llama_8b(*more: str) -> Config:
    """Llama 3 8B in bfloat16 under the settings of the debug config."""
    model = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": "false",
    }  # fmt: skip
    overrides = [f"model.{key}={value}" for key, value in model.items()]
    return resolve(load("configs/debug.yaml", [*overrides, "parallel.pp=4", *more]).config, 4)


def test_llama_3_8b_on_four_stages() -> None:
    """Shared schedules.md, section 5.2: by GEMM parameters alone the head is 2.4 layers, and 8/8/8/8 has a slowest
    stage of 10.4 against a mean of 8.6; the best whole numbers give 9."""
    head = 128256 * 4096 / (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    assert head == pytest.approx(2.4, abs=0.05)
    found = balance(LayerCosts((1.0,) * 32, head=head), registry.build("1f1b", 4, 16))
    assert found.uniform_slowest == pytest.approx(10.4, abs=0.05)
    assert found.slowest == 9
    assert found.mean == pytest.approx(8.6, abs=0.05)
    assert sorted(counts(found.split)[:3]) == [8, 9, 9]
    assert counts(found.split)[3] == 6
    assert "13.5% less" in found.text()


def test_costs_of_a_config_give_llama_3_8b_the_same_split() -> None:
    """Attention makes its layers somewhat longer than their parameters say; recomputation spares the head."""
    config = llama_8b("batch.sequence_length=8192", "pipeline.layout=balanced")
    costs = layer_costs(config)
    assert 1.7 < costs.head / costs.time[0] < 2.4
    assert sum(costs.parameter_bytes) + 2 * costs.head_bytes[0] == pytest.approx(16 * 8.03e9, rel=1e-3)
    again = layer_costs(llama_8b("batch.sequence_length=8192", "recompute.mode=full"))
    assert again.head / again.time[0] == pytest.approx(costs.head / costs.time[0] * 3 / 4)

    plan = registry.build("1f1b", 4, 16)
    assert counts(split_of(config, plan)) == counts(balance(costs, plan).split)
    assert counts(split_of(config, plan))[3] < 8
    text = balance_text(config, plan)
    assert text is not None
    assert "(8 | 8 | 8 | 8)" in text
    assert balance_text(llama_8b(), plan) is None
    assert counts(split_of(llama_8b(), plan)) == [8, 8, 8, 8]


def test_layers_that_predict_further_tokens_cost_the_last_stage_a_layer_and_a_head_each() -> None:
    plain, further = (layer_costs(llama_8b(f"model.num_nextn_predict_layers={depth}")) for depth in (0, 2))
    assert further.time == plain.time
    projection = plain.head * 2 * 4096 / 128256  # [hidden, 2 · hidden] beside the head's [vocabulary, hidden]
    assert further.head == pytest.approx(3 * plain.head + 2 * (plain.time[-1] + projection))
    held = [costs.head_bytes[0] for costs in (plain, further)]
    assert held[1] - held[0] == pytest.approx(2 * (plain.parameter_bytes[-1] + 16 * 2 * 4096**2))
    plan = registry.build("1f1b", 4, 16)
    assert counts(balance(further, plan).split)[3] < counts(balance(plain, plan).split)[3]


def test_a_balanced_layout_passes_the_check_and_still_needs_a_layer_per_stage() -> None:
    assert not [problem for problem in check(llama_8b("pipeline.layout=balanced")) if problem.key == "pipeline.layout"]
    few = llama_8b("pipeline.layout=balanced", "pipeline.schedule=interleaved_1f1b", "pipeline.virtual_stages=16")
    assert "more than model.num_hidden_layers=32; use at most 8" in check(few)[0].message


def test_uniform_and_balanced_are_the_same_where_head_and_embedding_cost_nothing() -> None:
    found = balance(LayerCosts((2.0,) * 24), registry.build("1f1b", 4, 8))
    assert counts(found.split) == [6, 6, 6, 6]
    assert found.gain == 0


def test_a_v_balances_ranks_and_not_stages() -> None:
    """Rank 0 has embedding and head: both its stages together are as long as those of the others."""
    costs = LayerCosts((1.0,) * 30, head=2.0)
    found = balance(costs, registry.build("zb_v", 4, 8))
    _, ranks, _ = Stages(costs, v_shape(4), Memory()).loads(counts(found.split))
    assert ranks == [8, 8, 8, 8]


def test_memory_moves_layers_to_ranks_that_hold_fewer_micro_batches() -> None:
    """1F1B's first rank holds four micro-batches, its last one."""
    costs = LayerCosts((1.0,) * 8, parameter_bytes=(1.0,) * 8, activation_bytes=(1.0,) * 8)
    plan = registry.build("1f1b", 4, 8)
    assert in_flight(plan) == (4, 3, 2, 1)
    assert counts(balance(costs, plan).split) == [2, 2, 2, 2]
    assert counts(balance(costs, plan, limit=8).split) == [1, 2, 2, 3]


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 4), st.integers(0, 6), st.integers(0, 6), st.integers(0, 2))
def test_refining_shortens_the_simulated_makespan_or_leaves_it(
    ranks: int, more: int, head: int, embedding: int
) -> None:
    layers = 2 * ranks + more
    costs = LayerCosts((1.0,) * layers, embedding, head)
    for name in ("1f1b", "zb_v"):
        plan = registry.build(name, ranks, 4)
        split = balance(costs, plan).split
        better = refined(costs, plan, split)
        assert sum(counts(better)) == layers
        before, after = (simulate(plan, stage_costs(costs, each)).makespan for each in (split, better))
        assert after <= before * (1 + 1e-9)
