"""Tied weights are one parameter, the configured depth is the built depth, and the rate depends on the step alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from trial_cases import TINY, compare, copies_are_equal, steps, text

from pool import Context, pool
from small import assembled, box_of, config_of
from ultrascale.assembly import check_build

TIED = {"model.tie_word_embeddings": True}
BATCHES = [text([64] * 8, seed=n) for n in range(3)]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {"parallel.pp": 2}),
        (4, {"parallel.pp": 2, "parallel.tp": 2}),
        (4, {"parallel.pp": 4}),
        (4, {"parallel.pp": 2, "parallel.dp": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [0, 3], ids=["at start", "after 3 steps"])
def test_head_and_embedding_on_different_stages_have_the_same_bits(
    world: int, layout: dict[str, Any], count: int
) -> None:
    settings = {**TIED, **layout, "optimizer.name": "adamw", "optimizer.lr": 0.01, "batch.sequence_length": 16}
    batches = [text([16] * 8, length=16, seed=n) for n in range(count)]
    found = steps(world, settings, batches)
    holders = [
        rank for rank, outcome in enumerate(found) if any(n == "embed_tokens.weight" for n, *_ in outcome.weights)
    ]
    assert len(holders) == (4 if world == 4 and layout["parallel.pp"] == 2 else 2)
    assert copies_are_equal(found, "weights") >= 1
    if count:
        alone = {key: value for key, value in settings.items() if not key.startswith("parallel")}
        compare(steps(1, alone, batches), found, 1e-7)


def test_a_tied_gradient_is_the_sum_of_those_of_embedding_and_head() -> None:
    """An untied model whose head was given the embedding's values computes both parts apart."""
    untied = {"model.tie_word_embeddings": False}
    apart = assembled(config_of({**TINY, **untied}))
    spans = {span.layout.name: (bucket, span) for bucket in apart.gradients.buckets for span in bucket.spans}
    values = {name: box_of(apart.store, bucket, span, bucket.masters) for name, (bucket, span) in spans.items()}
    values["lm_head.weight"].copy_(values["embed_tokens.weight"])
    from small import boxes, step_batch_of
    from ultrascale.step import train_step

    train_step(apart, step_batch_of(apart, *BATCHES[0]), 1)
    parts = {name: array for name, _, _, array in boxes(apart, "gradients")}
    (together,) = steps(1, TIED, BATCHES[:1])
    tied = {name: array for name, _, _, array in together.gradients}
    assert "lm_head.weight" not in tied
    total = parts["embed_tokens.weight"] + parts["lm_head.weight"]
    np.testing.assert_allclose(tied["embed_tokens.weight"], total, rtol=0, atol=1e-12 * np.abs(total).max())
    assert np.abs(parts["embed_tokens.weight"]).max() > 1e-3 * np.abs(total).max()


def test_tied_modules_share_one_memory_on_one_stage() -> None:
    assembly = assembled(config_of({**TINY, **TIED, "model.vocab_size": 512}))
    (stage,) = assembly.stages.values()
    named = {id(p): p for _, module in stage.units() for p in module.parameters()}
    large = [p for p in named.values() if p.shape[0] >= 512]  # nothing else has as many rows
    assert len({p.data_ptr() for p in large}) == 1
    assert check_build(assembly) == assembly.family.sizes().parameters


DEPTHS: list[tuple[int, int, Any, list[list[int]]]] = [
    (5, 2, None, [[0, 1, 2], [3, 4]]),
    (6, 4, None, [[0, 1], [2, 3], [4], [5]]),
    (5, 2, (1, 4), [[0], [1, 2, 3, 4]]),
    (3, 4, (0, 2, 1, 0), [[], [0, 1], [2], []]),
    (7, 2, "E t*3 | t*4 L", [[0, 1, 2], [3, 4, 5, 6]]),
]


def built(context: Context, overrides: dict[str, Any]) -> tuple[list[int], int]:
    assembly = assembled(config_of({**TINY, **overrides}, context.world_size), context)
    return [n for stage in assembly.stages for n in assembly.split[stage].layers], check_build(assembly)


@pytest.mark.parametrize(("layers", "pp", "layout", "expected"), DEPTHS, ids=str)
def test_as_many_layers_are_built_as_are_configured(
    layers: int, pp: int, layout: Any, expected: list[list[int]]
) -> None:
    found = pool(pp).run(built, {"model.num_hidden_layers": layers, "parallel.pp": pp, "pipeline.layout": layout})
    held = [rank for rank, _ in found]
    assert sorted(n for rank in held for n in rank) == list(range(layers))
    if layout is not None:
        assert held == expected
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert {count for _, count in found} == {layers * layer + 2 * 256 * 64 + 64}


@pytest.mark.parametrize(
    ("layers", "pp", "layout", "words"),
    [
        (5, 2, (2, 2), "model.num_hidden_layers=5"),
        (5, 2, (2, 4), "model.num_hidden_layers=5"),
        (5, 2, (5,), "parallel.pp=2"),
        (5, 2, (2, 2, 1), "parallel.pp=2"),
        (5, 1, (5,), "parallel.pp=1"),
        (3, 4, None, "model.num_hidden_layers=3"),
        (48, 4, (11, 12, 12, 12), "model.num_hidden_layers=48"),
        (7, 2, "E t*3 | t*3 L", "model.num_hidden_layers=7"),
    ],
    ids=str,
)
def test_a_split_that_would_change_the_depth_is_refused_with_both_numbers(
    layers: int, pp: int, layout: Any, words: str
) -> None:
    config = config_of({**TINY, "model.num_hidden_layers": layers, "parallel.pp": pp, "pipeline.layout": layout}, pp)
    problems = pipeline_problems(config)
    assert len(problems) == 1
    assert words in problems[0]


def pipeline_problems(config: Any) -> list[str]:
    from ultrascale.pipeline.check import check

    return [problem.message for problem in check(config)]


def test_two_stages_a_rank_are_refused_where_the_schedule_has_one() -> None:
    config = config_of({**TINY, "parallel.pp": 2, "pipeline.virtual_stages": 2}, 2)
    assert "pipeline.virtual_stages=2 does not fit" in pipeline_problems(config)[0]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {"batch.micro_size": 8}),
        (1, {"batch.micro_size": 2}),
        (2, {"parallel.dp": 2}),
        (4, {"parallel.dp": 4, "batch.micro_size": 2}),
        (2, {"parallel.pp": 2}),
    ],
    ids=str,
)
def test_the_rate_does_not_depend_on_replicas_or_accumulation(world: int, layout: dict[str, Any]) -> None:
    schedule = {"schedule.name": "linear", "schedule.total_steps": 6, "schedule.warmup_steps": 2}
    short = {"batch.sequence_length": 8, "model.num_hidden_layers": 2}
    batches = [text([8] * 8, length=8, seed=n) for n in range(7)]
    for outcome in steps(world, {**schedule, **short, **layout}, batches):
        assert outcome.rates == pytest.approx([0.05, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0])
