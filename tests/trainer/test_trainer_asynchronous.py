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

from ultrascale import trainer
from ultrascale.checkpoint import background as backgrounds
from ultrascale.checkpoint import snapshots
from ultrascale.checkpoint.background import Background
from ultrascale.checkpoint.boxes import Box, CheckpointError
from ultrascale.checkpoint.folder import latest
from ultrascale.checkpoint.manifest import read_manifest
from ultrascale.checkpoint.state import refuse_not_finite, state_boxes
from ultrascale.observe.run_folder import RunFolder

EVERY = {"checkpoint.every": 1, "checkpoint.keep": None, "run.steps": 4}
BESIDE = {**EVERY, "checkpoint.asynchronous": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2 pp2": (4, {"parallel.tp": 2, "parallel.pp": 2}),
    "dp2 zero1": (2, {"parallel.dp": 2, "parallel.zero_stage": 1}),
    "dp2 zero3": (2, {"parallel.dp": 2, "parallel.zero_stage": 3}),
}


def slow(rank: int) -> Any:
    """Writing begins late, at another time on each rank: the next steps are over by then (BL-081, NVIDIA-NeMo/
    Megatron-Bridge#3267: the step that was written down was the one that training had come to)."""
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
        until(lambda: len(metrics(tmp_path / "run")) > header["step"] or header["step"] == 4)
        steps_meanwhile.append(len(metrics(tmp_path / "run")) - header["step"])
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


@pytest.mark.parametrize("piece", [64, 1000, 1 << 20])
def test_host_memory_has_room_for_every_box_and_hardly_more(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backgrounds, "PIECE_BYTES", piece)
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int64)
    shapes = ((), (3, 5), (0, 4), (17,), (1, 1, 2), (40, 7))
    sources = [torch.arange(s.numel()).view(s).to(kind) for kind in kinds for s in map(torch.Size, shapes)]
    buffers = backgrounds.host_memory(sources, pinned=False)
    for buffer, source in zip(buffers, sources, strict=True):
        buffer.copy_(source)
    for buffer, source in zip(buffers, sources, strict=True):
        assert buffer.is_contiguous()
        assert torch.equal(buffer, source), "no two share a byte"
    pieces = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}
    needed = sum(source.numel() * source.element_size() for source in sources)
    assert needed <= sum(pieces.values()) <= needed + 64 * len(sources) + (len(pieces) - 1) * piece


def a_weight_is_broken_in_step_3(rank: int) -> Any:
    """After the update, where neither loss nor gradient of the step show it; on the last rank."""
    original = trainer.train_step

    def step(assembly: Any, batch: Any, number: int, *rest: Any) -> Any:
        result = original(assembly, batch, number, *rest)
        if number == 3:
            assembly.optimizer.weights.settle()  # a gather under way would put back what was there
        if number == 3 and rank == assembly.mesh.world_size - 1:
            next(state_boxes(assembly.optimizer, owned=True)).tensor.detach().flatten()[-1:].fill_(float("inf"))
        return result

    return patch.object(trainer, "train_step", step)


@pytest.mark.parametrize("beside", [True, False], ids=["beside training", "at once"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, beside: bool) -> None:
    settings = {**BESIDE, "checkpoint.asynchronous": beside, "run.steps": 1000, **LAYOUTS["dp2 zero1"][1]}
    settings["observe.replica_check_every"] = 0  # it would see it first
    outcomes = train(2, tmp_path / "run", settings, [a_weight_is_broken_in_step_3])
    assert 0 not in codes(outcomes)
    assert checkpoints(tmp_path / "run") == ["step-00000001", "step-00000002"]
    said = status(tmp_path / "run")
    assert (said["state"], said["exit_code"]) in (("failed", 1), ("stopped", 3))
    assert len(metrics(tmp_path / "run")) < 6


def test_what_overflows_in_a_sum_is_finite_and_saved() -> None:
    large = torch.full((4,), 3e38)
    refuse_not_finite([Box("w", (4,), (0,), large), Box("optimizer.exp_avg/w", (4,), (0,), large * torch.inf)])
    with pytest.raises(CheckpointError, match="w hold values that are not finite: nothing is saved"):
        refuse_not_finite([Box("w", (4,), (0,), large / 0)])


def test_what_is_written_about_steps_is_on_disk_before_their_checkpoint_counts(tmp_path: Path) -> None:
    order: list[str] = []

    def synced(self: RunFolder) -> None:
        order.append(f"lines up to {metrics(tmp_path / 'run')[-1]['step']}")

    original = snapshots.save

    def save(folder: Path, boxes: Any, header: Any, group: Any) -> int:
        order.append(folder.name)
        return original(folder, boxes, header, group)

    with patch.object(RunFolder, "sync", synced), patch.object(snapshots, "save", save):
        assert codes(train(1, tmp_path / "run", {**BESIDE, "checkpoint.every": 2})) == {0}
    assert [one for one in order if one.startswith("step")] == ["step-00000002", "step-00000004"]
    for place, name in ((0, "lines up to "), (2, "lines up to ")):
        assert order[place].startswith(name)
        assert int(order[place].removeprefix(name)) >= int(order[place + 1].removeprefix("step-"))
