"""Saving while training goes on: the state of its step is saved, one save runs at a time, a failure is loud (K4)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trainer_cases import (
    Job,
    checkpoints,
    codes,
    files,
    lines,
    metrics,
    numbers,
    status,
    train,
    until,
    yaml_file,
)

from ultrascale.checkpoint import snapshots
from ultrascale.checkpoint.background import Background
from ultrascale.checkpoint.boxes import Box, CheckpointError
from ultrascale.checkpoint.folder import latest
from ultrascale.checkpoint.manifest import read_manifest

EVERY = {"checkpoint.every": 1, "checkpoint.keep": None, "run.steps": 4}
BESIDE = {**EVERY, "checkpoint.asynchronous": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2 pp2": (4, {"parallel.tp": 2, "parallel.pp": 2}),
    "dp2 zero1": (2, {"parallel.dp": 2, "parallel.zero_stage": 1}),
    "dp2 zero3": (2, {"parallel.dp": 2, "parallel.zero_stage": 3}),
}


def slow(rank: int) -> Any:
    """Writing begins late, at another time on each rank: the next steps are over by then."""
    original = snapshots.save

    def save(*arguments: Any) -> int:
        time.sleep(0.15 + 0.05 * rank)
        return original(*arguments)

    return patch.object(snapshots, "save", save)


def broken_on_rank_1_in_step_2(rank: int) -> Any:
    original = snapshots.save

    def save(folder: Path, boxes: Any, header: Any, group: Any) -> int:
        def failing() -> Iterator[Box]:
            yield from boxes
            if rank == group.size - 1 and header["step"] == 2:
                raise OSError(28, "No space left on device")

        return original(folder, failing(), header, group)

    return patch.object(snapshots, "save", save)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_checkpoint_holds_the_state_of_its_step_whatever_training_does_meanwhile(
    tmp_path: Path, name: str
) -> None:
    world, layout = LAYOUTS[name]
    assert codes(train(world, tmp_path / "at once", {**EVERY, **layout})) == {0}
    assert codes(train(world, tmp_path / "beside", {**BESIDE, **layout}, [slow])) == {0}
    assert (
        checkpoints(tmp_path / "beside") == checkpoints(tmp_path / "at once") == [f"step-{n:08d}" for n in range(1, 5)]
    )
    for folder in checkpoints(tmp_path / "beside"):
        one, other = (tmp_path / run / "checkpoints" / folder for run in ("at once", "beside"))
        found = read_manifest(other)
        for key in ("step", "data_position", "axes", "data"):
            assert found.header[key] == read_manifest(one).header[key], key
        before, after = files(one), files(other)
        assert before.keys() == after.keys()
        assert all(before[file] == after[file] for file in before if file.endswith(".safetensors")), folder
    assert numbers(tmp_path / "beside") == numbers(tmp_path / "at once")
    saved = [event["step"] for event in lines(tmp_path / "beside" / "events.jsonl") if event["event"] == "checkpoint"]
    assert saved == [1, 2, 3, 4]


def test_a_run_that_saved_beside_training_goes_on_as_the_unbroken_one(tmp_path: Path) -> None:
    settings = {**BESIDE, "checkpoint.every": 2, "run.steps": 6}
    train(1, tmp_path / "whole", settings)
    train(1, tmp_path / "parts", {**settings, "run.steps": 4}, [slow])
    assert codes(train(1, tmp_path / "parts", settings)) == {0}
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")


def test_one_save_runs_at_a_time_and_training_goes_on_during_it(tmp_path: Path) -> None:
    running, most, steps_meanwhile = [], [], []
    original = snapshots.save

    def watched(folder: Path, boxes: Any, header: Any, group: Any) -> int:
        assert threading.current_thread() is not threading.main_thread()
        running.append(header["step"])
        most.append(len(running))
        seen = len(metrics(tmp_path / "run"))
        until(lambda: len(metrics(tmp_path / "run")) > seen or header["step"] == 4)
        steps_meanwhile.append(len(metrics(tmp_path / "run")) - seen)
        result = original(folder, boxes, header, group)
        running.remove(header["step"])
        return result

    assert codes(train(1, tmp_path / "run", BESIDE, [lambda rank: patch.object(snapshots, "save", watched)])) == {0}
    assert most == [1] * 4
    # Step n is saved while step n + 1 is done, and no further: its own save waits for the one before.
    assert steps_meanwhile[:3] == [1] * 3


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_that_fails_ends_the_run_on_all_ranks_and_says_why(tmp_path: Path, world: int) -> None:
    settings = {**BESIDE, "run.steps": 1000, **({"parallel.tp": 2} if world == 2 else {})}
    outcomes = train(world, tmp_path / "run", settings, [broken_on_rank_1_in_step_2])
    assert codes(outcomes) == {1}
    assert checkpoints(tmp_path / "run") == ["step-00000001"]
    said = status(tmp_path / "run")
    assert said["state"] == "failed"
    assert "No space left on device" in said["reason"]
    assert len(metrics(tmp_path / "run")) < 20


def kill_while_saving(tmp_path: Path, steps: int) -> None:
    folder = tmp_path / f"killed-{steps}"
    config = yaml_file(tmp_path / "run.yaml", {**BESIDE, "checkpoint.keep": 2, "run.steps": 100_000})
    with Job(["--config", str(config), f"run.dir={folder}"], 1, tmp_path / "logs") as job:
        until(lambda: len(metrics(folder)) >= steps)
        job.send(0, signal.SIGKILL)
        assert job.wait(30) == [-signal.SIGKILL]
    newest = latest(folder / "checkpoints")
    assert newest is not None
    step = read_manifest(newest).step
    resumed = train(1, folder, {**BESIDE, "run.steps": step + 1})
    whole = train(1, tmp_path / f"whole-{steps}", {**EVERY, "run.steps": step + 1})
    assert codes(resumed) == {0}
    assert resumed[0].state == whole[0].state


def test_killed_while_it_saves_the_newest_whole_checkpoint_is_right(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 3)


@pytest.mark.prove
@pytest.mark.parametrize("steps", range(2, 22))
def test_killed_at_many_instants_the_newest_whole_checkpoint_is_right(tmp_path: Path, steps: int) -> None:
    kill_while_saving(tmp_path, steps)


def background(work: Any) -> tuple[Background, torch.Tensor, Box]:
    values = torch.arange(12.0).reshape(3, 4)
    return Background(work), values, Box("w", (3, 2), (0, 0), values[:, 1:3])


def test_the_copy_is_a_copy_and_its_memory_is_used_again() -> None:
    begin, seen, places = threading.Event(), [], []

    def work(folder: Path, boxes: list[Box], header: Any) -> None:
        begin.wait(20)
        seen.append((boxes[0].tensor.clone(), dict(header)))
        places.append(boxes[0].tensor.data_ptr())

    beside, values, box = background(work)
    header = {"step": 1, "position": {"samples": 4}}
    for step in (1, 2):
        begin.clear()
        expected = box.tensor.clone()
        header |= {"step": step}
        beside.start(Path("c"), [box], header)
        values.add_(100)
        header["position"]["samples"] = -1
        begin.set()
        beside.wait()
        assert torch.equal(seen[-1][0], expected)
        assert seen[-1][1]["step"] == step
        header["position"]["samples"] = 4
    assert all(found["position"]["samples"] == 4 for _, found in seen)
    assert places[0] == places[1]


def test_what_failed_is_raised_once_and_the_next_save_works() -> None:
    failing = [True]

    def work(*arguments: Any) -> None:
        if failing[0]:
            raise CheckpointError("the disk is full")

    beside, _, box = background(work)
    beside.start(Path("c"), [box], {})
    until(lambda: beside.failed)
    with pytest.raises(CheckpointError, match="the disk is full"):
        beside.start(Path("d"), [box], {})
    assert not beside.failed
    failing[0] = False
    beside.start(Path("d"), [box], {})
    beside.wait()
