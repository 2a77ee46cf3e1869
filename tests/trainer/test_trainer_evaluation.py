"""Evaluation works under every layout and leaves training alone (S5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_cases import codes, metrics, numbers, train

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (1, {"batch.micro_size": 4}),
    (2, {"parallel.pp": 2}),
    (2, {"parallel.tp": 2}),
    (2, {"parallel.dp": 2}),
    (4, {"parallel.pp": 2, "parallel.tp": 2, "pipeline.schedule": "gpipe"}),
    (4, {"parallel.pp": 2, "parallel.dp": 2}),
]


@pytest.mark.parametrize(("world", "layout"), [LAYOUTS[0], LAYOUTS[2], LAYOUTS[5]], ids=str)
def test_training_is_bitwise_the_same_with_and_without_evaluation(
    world: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    plain = train(world, tmp_path / "plain", {**layout, "run.steps": 3})
    watched = train(world, tmp_path / "watched", {**layout, "run.steps": 3, "evaluation.every": 1})
    assert [rank.evaluations for rank in watched] == [3] * world
    assert [rank.evaluations for rank in plain] == [0] * world
    assert [rank.state for rank in plain] == [rank.state for rank in watched]
    for line, other in zip(numbers(tmp_path / "plain"), numbers(tmp_path / "watched"), strict=True):
        assert other.pop("validation_loss") > 0
        assert other == line


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(*LAYOUTS[0], tmp_path_factory.mktemp("evaluation"))


def losses(world: int, layout: dict[str, Any], folder: Path) -> list[float]:
    settings = {**layout, "run.steps": 3, "evaluation.every": 1, "evaluation.batches": 2, "optimizer.name": "sgd"}
    outcomes = train(world, folder, {**settings, "precision.compute": "float64", "optimizer.max_norm": None})
    assert codes(outcomes) == {0}
    return [line["validation_loss"] for line in metrics(folder)]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS[1:], ids=str)
def test_the_validation_loss_is_that_of_one_process(
    world: int, layout: dict[str, Any], one_process: list[float], tmp_path: Path
) -> None:
    assert losses(world, layout, tmp_path / "run") == pytest.approx(one_process, rel=1e-9)
    assert len(set(one_process)) == 3  # the model moves, and the loss with it


def test_every_evaluation_sees_the_same_held_out_tokens(tmp_path: Path) -> None:
    settings = {"run.steps": 3, "evaluation.every": 1, "optimizer.lr": 0.0, "optimizer.weight_decay": 0.0}
    train(1, tmp_path / "run", settings)
    found = metrics(tmp_path / "run")
    assert len({line["validation_loss"] for line in found}) == 1
    assert len({line["loss"] for line in found}) == 3
    assert not {line["validation_loss"] for line in found} & {line["loss"] for line in found}
