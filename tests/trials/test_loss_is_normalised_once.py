"""The step's loss is a sum over the global batch divided once by its targets, and so is its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from trial_cases import TINY, TOLERANCE, Outcome, compare, steps, text

from small import assembled, config_of, step_batch_of

UNEVEN = [min(64, 5 + 11 * i) for i in range(8)]
SPLITS = [{"batch.micro_size": 8}, {"batch.micro_size": 4}, {"batch.micro_size": 2}]


@pytest.fixture(scope="module")
def one_by_one() -> list[Outcome]:
    return steps(1, {"batch.micro_size": 1}, [text(UNEVEN, seed=n) for n in range(3)])


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_gradients_do_not_depend_on_the_split_into_micro_batches(
    split: dict[str, Any], one_by_one: list[Outcome]
) -> None:
    compare(one_by_one, steps(1, split, [text(UNEVEN, seed=n) for n in range(3)]))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_twenty_steps_have_the_same_losses_under_every_split(optimizer: str) -> None:
    batches = [text([max(1, kept // 4) for kept in UNEVEN], length=16, seed=n) for n in range(20)]
    short = {
        "batch.sequence_length": 16,
        "model.num_hidden_layers": 1,
        "optimizer.name": optimizer,
        "optimizer.lr": 0.01,
    }
    expected = steps(1, {**short, "batch.micro_size": 8}, batches)
    for size in (1, 4):
        found = steps(1, {**short, "batch.micro_size": size}, batches)
        np.testing.assert_allclose(found[0].losses, expected[0].losses, rtol=TOLERANCE)
        np.testing.assert_allclose(found[0].norms, expected[0].norms, rtol=TOLERANCE)
    assert expected[0].losses[-1] != expected[0].losses[0]


def test_the_loss_is_the_mean_over_targets_of_the_cross_entropy_of_the_logits(one_by_one: list[Outcome]) -> None:
    """Against torch's own cross entropy on logits, which knows nothing of micro-batches."""
    inputs, labels = text(UNEVEN)
    assembly = assembled(config_of({**TINY, "batch.micro_size": 8}))
    with torch.no_grad():
        (out,) = assembly.evaluation.run(step_batch_of(assembly, inputs, None))
    expected = cross_entropy(out["logits"].reshape(-1, 256), labels.reshape(-1)).item()
    assert one_by_one[0].losses[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_has_the_norm_and_the_weight_change_of_one_process(schedule: str) -> None:
    settings = {"optimizer.lr": 1e-3, "batch.micro_size": 2}
    batches = [text([64] * 8)]
    expected = steps(1, settings, batches)
    found = steps(2, {**settings, "parallel.pp": 2, "pipeline.schedule": schedule}, batches)
    compare(expected, found)


def test_more_micro_batches_than_stages_are_summed_and_not_averaged() -> None:
    batches = [text([max(1, 64 - 5 * n) for n in range(12)])]
    settings = {"batch.global_size": 12, "batch.micro_size": 2}
    compare(steps(1, settings, batches), steps(2, {**settings, "parallel.pp": 2}, batches))


@pytest.mark.parametrize("kept", [[60] * 4 + [4] * 4, [64] * 4 + [0] * 4], ids=["60 and 4", "all and none"])
def test_replicas_with_unequal_targets_give_the_mean_over_tokens(kept: list[int]) -> None:
    batches = [text(kept, seed=n) for n in range(2)]
    compare(steps(1, {}, batches), steps(2, {"parallel.dp": 2}, batches))


def test_four_replicas_and_two_give_the_same_gradients() -> None:
    batches = [text(UNEVEN, seed=n) for n in range(2)]
    expected = steps(1, {}, batches)
    compare(expected, steps(2, {"parallel.dp": 2}, batches))
    compare(expected, steps(4, {"parallel.dp": 4}, batches))
    compare(expected, steps(4, {"parallel.dp": 2, "parallel.tp": 2}, batches))


def test_a_step_without_any_target_is_finite_and_only_decays() -> None:
    settings = {"optimizer.name": "adamw", "optimizer.lr": 0.1, "optimizer.weight_decay": 0.5}
    (outcome,) = steps(1, settings, [text([0] * 8)])
    assert outcome.losses == [0.0]
    assert outcome.norms == [0.0]
    (start,) = steps(1, settings, [])
    for (name, *_, before), (_, *_, after) in zip(start.weights, outcome.weights, strict=True):
        factor = 1.0 if "norm" in name else 1.0 - 0.1 * 0.5
        np.testing.assert_array_equal(after, before * factor, err_msg=name)
