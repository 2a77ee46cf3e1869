"""A run that is asked to stop, or that meets a gradient that is no number, stops whole, on all ranks, once (K6)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trainer_cases import (
    Fault,
    Job,
    checkpoints,
    codes,
    lines,
    metrics,
    numbers,
    status,
    tensors,
    train,
    until,
    yaml_file,
)

from ultrascale import step as stepping
from ultrascale import trainer
from ultrascale.parallel.gradients import Gradients


def asked(folder: Path) -> list[dict[str, Any]]:
    return [event for event in lines(folder / "events.jsonl") if event["event"] == "stop"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_to_one_rank_stops_all_after_the_step_with_a_checkpoint_and_exit_3(
    number: signal.Signals, tmp_path: Path
) -> None:
    world, layout = (2, {"parallel.pp": 2})
    config = yaml_file(tmp_path / "run.yaml", {**layout, "run.steps": 100_000, "checkpoint.every": 1000})
    folder = tmp_path / "stopped"
    with Job(["--config", str(config), f"run.dir={folder}"], world, tmp_path / "logs") as job:
        until(lambda: len(metrics(folder)) >= 2)
        job.send(1, number)
        assert job.wait(30) == [3, 3]
        assert "Traceback" not in job.said(0) + job.said(1)
        assert "a signal asked to stop" in job.said(0)
    last = metrics(folder)[-1]["step"]
    assert status(folder) == {"state": "stopped", "step": last, "reason": "a signal asked to stop", "exit_code": 3}
    assert checkpoints(folder) == [f"step-{last:08d}"]
    assert [event["step"] for event in asked(folder)] == [last]

    settings = {**layout, "checkpoint.every": 1000, "run.steps": last + 2}
    resumed = train(world, folder, settings)
    whole = train(world, tmp_path / "whole", settings)
    assert codes(resumed) == {0}
    assert [rank.state for rank in resumed] == [rank.state for rank in whole]
    assert numbers(folder) == numbers(tmp_path / "whole")
    assert status(folder) == {"state": "finished", "step": last + 2, "reason": None, "exit_code": 0}


def test_signals_to_all_ranks_at_once_stop_once(tmp_path: Path) -> None:
    """What torchrun does when it is itself told to end."""
    config = yaml_file(tmp_path / "run.yaml", {"parallel.dp": 2, "run.steps": 100_000, "checkpoint.every": 1000})
    with Job(["--config", str(config), f"run.dir={tmp_path / 'run'}"], 2, tmp_path / "logs") as job:
        until(lambda: len(metrics(tmp_path / "run")) >= 2)
        for rank in (0, 1):
            job.send(rank, signal.SIGTERM)
        assert job.wait(30) == [3, 3]
    assert len(asked(tmp_path / "run")) == len(checkpoints(tmp_path / "run")) == 1


def test_a_signal_in_the_last_step_does_not_undo_that_the_run_is_finished(tmp_path: Path) -> None:
    (outcome,) = train(1, tmp_path / "run", {"run.steps": 3, "checkpoint.every": 1}, [a_signal_comes_in_step_3])
    assert outcome.code == 0
    assert status(tmp_path / "run")["state"] == "finished"
    (outcome,) = train(1, tmp_path / "longer", {"run.steps": 4, "checkpoint.every": 1}, [a_signal_comes_in_step_3])
    assert outcome.code == 3
    assert checkpoints(tmp_path / "longer")[-1] == "step-00000003"


def a_signal_comes_in_step_3(rank: int) -> Any:
    original = trainer.Trainer._arrays

    def arrays(self: trainer.Trainer, step: int) -> Any:
        found = original(self, step)
        if step == 3:
            self.wishes.on_stop_signal(signal.SIGTERM, None)
        return found

    return patch.object(trainer.Trainer, "_arrays", arrays)


def poisoned(value: float, rank: int, only: int) -> Any:
    """One element of one gradient is `value` in step 2, on one rank."""
    original = Gradients.finish

    def finish(self: Gradients) -> None:
        original(self)
        self.steps_seen = getattr(self, "steps_seen", 0) + 1
        if rank == only and self.steps_seen == 2:
            bucket = self.buckets[-1]
            bucket.gradients[bucket.spans[0].start] = value

    return patch.object(Gradients, "finish", finish)


def a_gradient_is_nan_in_step_2(rank: int) -> Any:
    return poisoned(float("nan"), rank, 0)


def a_gradient_is_infinite_in_step_2(rank: int) -> Any:
    return poisoned(float("inf"), rank, 0)


def the_loss_is_nan_in_step_2(rank: int) -> Any:
    original = stepping.term_sums
    calls = []

    def sums(*args: Any) -> torch.Tensor:
        calls.append(1)
        found = original(*args)
        return found * float("nan") if len(calls) == 2 else found

    return patch.object(stepping, "term_sums", sums)


@pytest.mark.parametrize(
    ("wrong", "world", "layout"),
    [
        (a_gradient_is_nan_in_step_2, 1, {}),
        (a_gradient_is_nan_in_step_2, 2, {"parallel.tp": 2}),
        (a_gradient_is_nan_in_step_2, 2, {"parallel.pp": 2}),
        (a_gradient_is_nan_in_step_2, 2, {"parallel.dp": 2}),
        (a_gradient_is_infinite_in_step_2, 2, {"parallel.pp": 2}),
        (the_loss_is_nan_in_step_2, 2, {"parallel.dp": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_not_finite_stops_before_any_parameter_is_touched(
    wrong: Fault, world: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**layout, "run.steps": 3, "checkpoint.every": 100}
    sound = train(world, tmp_path / "sound", {**settings, "run.steps": 1})
    stopped = train(world, tmp_path / "run", settings, [wrong])
    assert codes(stopped) == {3}
    assert [rank.state for rank in stopped] == [rank.state for rank in sound]
    found = status(tmp_path / "run")
    assert (found["state"], found["step"], found["exit_code"]) == ("stopped", 1, 3)
    assert "step 2 is not finite" in found["reason"]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    saved, expected = (tensors(tmp_path / name / "checkpoints" / "step-00000001") for name in ("run", "sound"))
    assert all((saved[name] == expected[name]).all() for name in expected)

    # What was saved is sound: without the fault, the same command finishes as if nothing had been.
    resumed = train(world, tmp_path / "run", settings)
    whole = train(world, tmp_path / "whole", settings)
    assert codes(resumed) == {0}
    assert [rank.state for rank in resumed] == [rank.state for rank in whole]


def the_loss_of_step_1_is_nan(rank: int) -> Any:
    original = stepping.term_sums
    return patch.object(stepping, "term_sums", lambda *args: original(*args) * float("nan"))


def test_a_first_step_that_is_not_finite_stops_without_a_checkpoint(tmp_path: Path) -> None:
    (outcome,) = train(1, tmp_path / "run", {"run.steps": 2, "checkpoint.every": 1}, [the_loss_of_step_1_is_nan])
    assert outcome.code == 3
    assert status(tmp_path / "run")["state"] == "stopped"
    assert status(tmp_path / "run")["step"] == 0
    assert metrics(tmp_path / "run") == []
    assert not checkpoints(tmp_path / "run")
