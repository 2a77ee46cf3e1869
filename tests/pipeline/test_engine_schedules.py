"""What the engine holds under every schedule, and evaluation over stages wherever a schedule puts them."""

from __future__ import annotations

from typing import Any

import pytest

from pool import Context, pool
from small import assembled, config_of, step_batch_of, tokens
from ultrascale.assembly import Assembly, training_plan
from ultrascale.config.schema import Config
from ultrascale.pipeline.actions import COMPUTE, Action
from ultrascale.pipeline.activations import peak_activations
from ultrascale.pipeline.engine import Engine
from ultrascale.pipeline.schedules.registry import SCHEDULES

TRAINING = [entry for entry in SCHEDULES if entry.training]
MICRO_BATCHES = 8


def config_for(name: str, ranks: int, **more: Any) -> Config:
    (entry,) = [entry for entry in SCHEDULES if entry.name == name]
    overrides = {
        "parallel.pp": ranks,
        "pipeline.schedule": name,
        "batch.global_size": MICRO_BATCHES,
        "model.num_hidden_layers": max(4, ranks * entry.virtual_stages),
    }
    return config_of({**overrides, **more}, ranks)


def held(engine: Engine) -> int:
    """(stage, micro-batch) of which activations, or what weight gradients need of them, are kept."""
    assert engine.gradients is not None
    return len(engine._in_flight.keys() | engine.gradients._deferred.keys())


def _most_held(context: Context, config: Config) -> tuple[int, list[tuple[str, str]]]:
    assembly = assembled(config, context)
    engine = assembly.engine
    most = 0
    execute = dict(engine._execute)

    def noting(action: Action) -> None:
        nonlocal most
        execute[action.kind](action)
        most = max(most, held(engine))

    engine._execute = dict.fromkeys(execute, noting)
    engine.timeline = []
    engine.run(step_batch_of(assembly, *tokens(config)))
    assembly.gradients.finish()
    assert held(engine) == 0
    return most, [(timed.kind, timed.action) for timed in engine.timeline]


@pytest.mark.parametrize("name", [entry.name for entry in TRAINING])
def test_what_is_held_and_what_is_run_are_the_plans(name: str) -> None:
    ranks = 2
    config = config_for(name, ranks)
    plan = training_plan(config)
    seen = pool(ranks).run(_most_held, config)
    for rank, (most, ran) in enumerate(seen):
        # An FB holds one more while it runs than after it.
        pairs = any(action.parts for action in plan.actions[rank])
        assert peak_activations(plan)[rank] - pairs <= most <= peak_activations(plan)[rank], f"rank {rank}"
        assert [text for _, text in ran] == [str(a) for a in plan.actions[rank] if a.kind in COMPUTE]
        assert [kind for kind, _ in ran] == [str(a.kind) for a in plan.actions[rank] if a.kind in COMPUTE]


def _evaluated(context: Context | None, config: Config) -> tuple[float, int]:
    assembly: Assembly = assembled(config, context)
    before = [bucket.masters.clone() for bucket in assembly.gradients.buckets]
    outputs = assembly.evaluation.run(step_batch_of(assembly, *tokens(config)))
    assert all((a == b.masters).all() for a, b in zip(before, assembly.gradients.buckets, strict=True))
    return sum(float(output["lm"]) for output in outputs), len(outputs)


@pytest.mark.parametrize("name", [entry.name for entry in TRAINING])
@pytest.mark.parametrize("ranks", [2, 4])
def test_evaluation_runs_over_the_stages_where_training_put_them(name: str, ranks: int) -> None:
    config = config_for(name, ranks)
    found = pool(ranks).run(_evaluated, config)
    expected, micro_batches = _evaluated(
        None,
        config_of({"batch.global_size": MICRO_BATCHES, "model.num_hidden_layers": config.model.num_hidden_layers}),
    )
    assert micro_batches == MICRO_BATCHES == sum(count for _, count in found)
    assert sum(loss for loss, _ in found) == pytest.approx(expected, rel=1e-12)
