"""Saves that a clock or a signal asks for: all ranks make the same ones (K6)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from trainer_cases import Job, checkpoints, codes, lines, metrics, status, train, until, yaml_file

from ultrascale import trainer, wishes

LAYOUT = {"parallel.pp": 2}


def rank_0_has_a_fast_clock(rank: int) -> Any:
    """An hour goes by between two looks on rank 0; on the others time stands still."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 3600.0 if rank == 0 else 0.0
        return now[0]

    return patch.object(wishes.time, "monotonic", monotonic)


def other_ranks_have_a_fast_clock(rank: int) -> Any:
    return rank_0_has_a_fast_clock(1 if rank == 0 else 0)


def test_the_clock_of_rank_0_decides_for_all(tmp_path: Path) -> None:
    settings = {**LAYOUT, "run.steps": 4, "checkpoint.every_minutes": 50.0, "checkpoint.keep": None}
    assert codes(train(2, tmp_path / "fast", settings, [rank_0_has_a_fast_clock])) == {0}
    assert checkpoints(tmp_path / "fast") == [f"step-{n:08d}" for n in (1, 2, 3, 4)]
    assert codes(train(2, tmp_path / "slow", settings, [other_ranks_have_a_fast_clock])) == {0}
    assert checkpoints(tmp_path / "slow") == ["step-00000004"], "one at the end, and none that only rank 1 wants"


def test_minutes_are_counted_from_the_last_save_whatever_asked_for_it(tmp_path: Path) -> None:
    """Rank 0 looks at its clock in each step and in each save: 60 minutes after step 1, 120 after step 2, and so on."""
    settings = {"run.steps": 6, "checkpoint.every_minutes": 90.0, "checkpoint.every": 3, "checkpoint.keep": None}
    assert codes(train(1, tmp_path / "run", settings, [rank_0_has_a_fast_clock])) == {0}
    assert checkpoints(tmp_path / "run") == [f"step-{n:08d}" for n in (2, 3, 5, 6)]


def test_usr2_to_one_rank_saves_on_all_and_the_run_goes_on(tmp_path: Path) -> None:
    config = yaml_file(tmp_path / "run.yaml", {**LAYOUT, "run.steps": 100_000, "checkpoint.every": 0})
    folder = tmp_path / "run"
    with Job(["--config", str(config), f"run.dir={folder}"], 2, tmp_path / "logs") as job:
        until(lambda: len(metrics(folder)) >= 2)
        job.send(1, signal.SIGUSR2)
        until(
            lambda: checkpoints(folder) and (folder / "checkpoints" / checkpoints(folder)[0] / "manifest.json").exists()
        )
        seen = len(metrics(folder))
        until(lambda: len(metrics(folder)) > seen + 1)
        assert status(folder)["state"] == "running"
        job.send(0, signal.SIGTERM)
        assert job.wait(30) == [3, 3]
    saved = [event["step"] for event in lines(folder / "events.jsonl") if event["event"] == "checkpoint"]
    assert len(saved) == 2, "one that was asked for, and one at the stop"
    assert [int(name.removeprefix("step-")) for name in checkpoints(folder)] == sorted(saved)


@pytest.mark.parametrize("asked", [1, 2])
def test_a_wish_to_save_at_a_step_that_is_saved_anyway_makes_one_checkpoint(tmp_path: Path, asked: int) -> None:
    def a_wish(rank: int) -> Any:
        original = trainer.Trainer._arrays

        def arrays(self: trainer.Trainer, step: int) -> Any:
            if step == asked:
                self.wishes.on_save_signal(signal.SIGUSR2, None)
            return original(self, step)

        return patch.object(trainer.Trainer, "_arrays", arrays)

    settings = {"run.steps": 4, "checkpoint.every": 2, "checkpoint.keep": None}
    assert codes(train(1, tmp_path / "run", settings, [a_wish])) == {0}
    assert checkpoints(tmp_path / "run") == sorted({f"step-{n:08d}" for n in (asked, 2, 4)})
