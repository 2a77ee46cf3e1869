"""A run that stopped and went on is the run that did not stop (D1, D2): state, metrics, data and learning rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_cases import (
    checkpoints,
    codes,
    every_rank_dies_in_step_6,
    files,
    lines,
    metrics,
    numbers,
    status,
    tensors,
    train,
)

TP, PP, DP = {"parallel.tp": 2}, {"parallel.pp": 2}, {"parallel.dp": 2}
# Every stage twice; two stages of one rank that share the tied embedding, with weight gradients of their own.
TWO_WAY = {**PP, "pipeline.schedule": "dualpipe", "batch.micro_size": 1}
V_SHAPED = {**PP, "pipeline.schedule": "zb_v", "model.num_hidden_layers": 4}
SHARED = {**DP, "parallel.zero_stage": 3}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, TP),
    (2, PP),
    (2, DP),
    (2, TWO_WAY),
    (2, V_SHAPED),
    (2, SHARED),
]
NAMES = ["one process", "tp2", "pp2", "dp2", "pp2 dualpipe", "pp2 zb_v", "dp2 zero 3"]
COSINE = {"schedule.name": "cosine", "schedule.total_steps": 7, "schedule.warmup_steps": 2, "schedule.min_lr": 0.001}


def same_files(one: Path, other: Path) -> None:
    """The newest checkpoint of both runs, tensor files byte for byte."""
    assert checkpoints(one)[-1] == checkpoints(other)[-1]
    for_one, for_other = (files(folder / "checkpoints" / checkpoints(folder)[-1]) for folder in (one, other))
    assert for_one.keys() == for_other.keys()
    for name in for_one:
        if name.endswith(".safetensors"):
            assert for_one[name] == for_other[name], name


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=NAMES)
def test_2n_steps_equal_n_steps_a_resume_and_n_steps_bit_for_bit(
    world: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**layout, **COSINE, "evaluation.every": 2, "evaluation.batches": 1, "checkpoint.every": 3}
    whole = train(world, tmp_path / "whole", {**settings, "run.steps": 6})
    first = train(world, tmp_path / "parts", {**settings, "run.steps": 3})
    second = train(world, tmp_path / "parts", {**settings, "run.steps": 6})
    assert codes(whole) == codes(first) == codes(second) == {0}
    for rank, (expected, found) in enumerate(zip(whole, second, strict=True)):
        assert len(expected.state) >= 3  # a master and both moments at least
        assert {name.split("/")[0] for name in expected.state if "/" in name} == {
            "optimizer.exp_avg",
            "optimizer.exp_avg_sq",
        }
        assert expected.state.keys() == found.state.keys()
        differing = [name for name, box in expected.state.items() if box != found.state[name]]
        assert not differing, f"rank {rank}: {differing}"
        assert sorted(found.samples) == [4, 5, 6]
        assert all(found.samples[step] == expected.samples[step] for step in found.samples)
    assert [line["step"] for line in metrics(tmp_path / "parts")] == list(range(1, 7))
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")
    # Not because nothing moved: the first half differs from the second.
    assert any(box != second[0].state[name] for name, box in first[0].state.items())


def test_after_a_crash_metrics_are_cut_back_to_the_checkpoint_and_each_step_is_there_once(tmp_path: Path) -> None:
    settings = {"run.steps": 8, "checkpoint.every": 4}
    train(1, tmp_path / "whole", settings)
    (crashed,) = train(1, tmp_path / "parts", settings, [every_rank_dies_in_step_6])
    assert crashed.error == "crash"
    assert [line["step"] for line in metrics(tmp_path / "parts")] == [1, 2, 3, 4, 5]
    assert checkpoints(tmp_path / "parts") == ["step-00000004"]

    (resumed,) = train(1, tmp_path / "parts", settings)
    assert sorted(resumed.samples) == [5, 6, 7, 8]  # step 5 again, from the checkpoint of step 4
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    same_files(tmp_path / "whole", tmp_path / "parts")
    (event,) = [event for event in lines(tmp_path / "parts" / "events.jsonl") if event["event"] == "resume"]
    assert event["step"] == 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, {"parallel.tp": 2, "parallel.pp": 2}), (2, DP)),
        ((2, SHARED), (4, {"parallel.tp": 4})),  # two KV heads: replicated
        ((1, {}), (4, {"parallel.dp": 4, "parallel.zero_stage": 1, "parallel.dp_shard": 2, "batch.micro_size": 1})),
        ((2, TWO_WAY), (1, {})),
        ((1, {}), (4, {"parallel.tp": 2, "parallel.pp": 2, "pipeline.layout": (0, 2)})),
    ],
    ids=[
        "tp2·pp2 to dp2",
        "dp2 zero 3 to tp4",
        "one to dp4 zero 1, two by two",
        "pp2 dualpipe to one",
        "one to tp2·pp2",
    ],
)
def test_going_on_under_another_layout_is_the_same_run_within_rounding(
    before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    settings = {**COSINE, "precision.compute": "float64", "checkpoint.every": 3}
    (whole,) = train(1, tmp_path / "whole", {**settings, "run.steps": 6})
    first = train(before[0], tmp_path / "parts", {**settings, **before[1], "run.steps": 3})
    second = train(after[0], tmp_path / "parts", {**settings, **after[1], "run.steps": 6})
    assert codes(first) == codes(second) == {0}
    for step in range(1, 7):
        part = first if step <= 3 else second
        assert {n for rank in part for n in rank.samples.get(step, [])} == set(whole.samples[step])
    # Two float64 runs whose sums have other orders: 1e-16 per operation, stretched by Adam's division.
    for expected, found in zip(numbers(tmp_path / "whole"), numbers(tmp_path / "parts"), strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-9), (expected["step"], key)
    expected_tensors, found_tensors = (
        tensors(tmp_path / name / "checkpoints" / "step-00000006") for name in ("whole", "parts")
    )
    assert expected_tensors.keys() == found_tensors.keys()
    for name, values in expected_tensors.items():
        np.testing.assert_allclose(found_tensors[name], values, rtol=0, atol=1e-9 * np.abs(values).max(), err_msg=name)


def test_a_longer_run_begins_like_the_shorter_one(tmp_path: Path) -> None:
    short = {"run.steps": 3, **COSINE, "checkpoint.every": 2}
    train(1, tmp_path / "short", short)
    (long,) = train(1, tmp_path / "long", {**short, "run.steps": 6})
    assert numbers(tmp_path / "long")[:3] == numbers(tmp_path / "short")
    assert checkpoints(tmp_path / "short") == ["step-00000002", "step-00000003"]

    (extended,) = train(1, tmp_path / "short", {**short, "run.steps": 6})
    assert numbers(tmp_path / "short") == numbers(tmp_path / "long")
    assert extended.state == long.state


def by_hand(name: str, step: int) -> float:
    """peak 0.01, warm-up of 3 steps, 10 steps in all, min_lr 0.001, wsd with a decay of 4: DESIGN's formulas."""
    if step <= 3:
        return 0.01 * step / 3
    if name == "constant":
        return 0.01
    begin = 6 if name == "wsd" else 3
    done = min(1.0, max(0.0, (step - begin) / (10 - begin)))
    left = (1 + math.cos(math.pi * done)) / 2 if name == "cosine" else 1 - done
    return 0.001 + 0.009 * left


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_the_learning_rate_of_every_step_is_the_formula_whatever_the_resumes(name: str, tmp_path: Path) -> None:
    schedule: dict[str, Any] = {"schedule.name": name, "schedule.warmup_steps": 3, "checkpoint.every": 5}
    if name != "constant":
        schedule |= {"schedule.total_steps": 10, "schedule.min_lr": 0.001}
    if name == "wsd":
        schedule["schedule.decay_steps"] = 4
    for steps in (2, 9, 12):
        assert codes(train(1, tmp_path / "run", {**schedule, "run.steps": steps})) == {0}
    assert [line["lr"] for line in metrics(tmp_path / "run")] == pytest.approx(
        [by_hand(name, step) for step in range(1, 13)], rel=1e-12
    )


def test_a_path_goes_on_from_another_run_and_leaves_that_run_alone(tmp_path: Path) -> None:
    settings = {"checkpoint.every": 2}
    train(1, tmp_path / "a", {**settings, "run.steps": 4})
    before = files(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "checkpoints" / "step-00000002"):
        folder = tmp_path / f"b{path.name}"
        (resumed,) = train(1, folder, {**settings, "run.steps": 6, "run.resume": str(path)})
        first = 3 if path.name == "step-00000002" else 5
        assert [line["step"] for line in metrics(folder)] == sorted(resumed.samples) == list(range(first, 7))
        assert files(tmp_path / "a") == before
        # The same command again goes on from its own checkpoint, not from where it came.
        (again,) = train(1, folder, {**settings, "run.steps": 7, "run.resume": str(path)})
        assert sorted(again.samples) == [7]
        assert status(folder) == {"state": "finished", "step": 7, "reason": None, "exit_code": 0}
