"""SIGKILL of any rank ends the job soon, says which rank died, and loses nothing that was saved (F3, K2)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from trainer_cases import (
    Job,
    checkpoints,
    codes,
    ended,
    metrics,
    numbers,
    status,
    torchrun,
    train,
    until,
    workers,
    yaml_file,
)

from ultrascale import trainer

LAYOUT = {"parallel.tp": 2, "parallel.pp": 2}
STEPS = 9


@pytest.mark.parametrize(
    ("victim", "installed"),
    [
        pytest.param(2, False, id="rank 2"),
        *(pytest.param(n, True, id=f"rank {n}, of the installed python", marks=pytest.mark.prove) for n in range(4)),
    ],
)
def test_a_killed_rank_ends_the_job_is_named_and_the_run_goes_on_from_its_newest_checkpoint(
    victim: int, installed: bool, tmp_path: Path, warm: Path
) -> None:
    settings = {**LAYOUT, "checkpoint.every": 2, "checkpoint.keep": None}
    config = yaml_file(tmp_path / "run.yaml", {**settings, "run.steps": 100_000})
    folder = tmp_path / "killed"
    python = sys.executable if installed else str(warm / "python")
    with ended(torchrun(["--config", str(config), f"run.dir={folder}"], 4, python)) as launcher:
        until(lambda: len(metrics(folder)) >= 3)
        os.kill(workers(launcher)[victim], signal.SIGKILL)
        killed = time.monotonic()
        said, _ = launcher.communicate(timeout=40)
        assert time.monotonic() - killed < 30
    assert launcher.returncode != 0
    cause = said[said.index("Root Cause") :]
    assert f"(local_rank: {victim})" in cause
    assert "SIGKILL" in cause
    assert status(folder)["state"] != "finished"

    newest = int(checkpoints(folder)[-1].removeprefix("step-"))
    assert newest >= 2
    resumed = train(4, folder, {**settings, "run.steps": newest + 2})
    assert codes(resumed) == {0}
    assert sorted(resumed[0].samples) == [newest + 1, newest + 2]
    whole = train(4, tmp_path / "whole", {**settings, "run.steps": newest + 2})
    assert [rank.state for rank in resumed] == [rank.state for rank in whole]
    assert numbers(folder) == numbers(tmp_path / "whole")


@pytest.mark.parametrize(
    "victim", [0, 3, *(pytest.param(rank, marks=pytest.mark.prove) for rank in (1, 2))], ids="rank {}".format
)
def test_no_rank_outlives_another_that_was_killed(victim: int, tmp_path: Path) -> None:
    """Without a launcher that would end them: every other rank finds out by itself."""
    config = yaml_file(tmp_path / "run.yaml", {**LAYOUT, "run.steps": 100_000})
    with Job(["--config", str(config), f"run.dir={tmp_path / 'run'}"], 4, tmp_path / "logs") as job:
        until(lambda: len(metrics(tmp_path / "run")) >= 2)
        job.send(victim, signal.SIGKILL)
        ends = job.wait(30)
    assert ends[victim] == -signal.SIGKILL
    assert None not in ends
    assert all(code not in (0, 2, 3) for rank, code in enumerate(ends) if rank != victim)


def rank_1_sleeps_in_step_3(rank: int) -> None:
    original = trainer.train_step

    def step(assembly: Any, batch: Any, number: int, *rest: Any) -> Any:
        if rank == 1 and number == 3:
            time.sleep(600)
        return original(assembly, batch, number, *rest)

    patch.object(trainer, "train_step", step).start()


def test_ranks_that_wait_for_one_that_hangs_end_after_the_timeout(tmp_path: Path) -> None:
    config = yaml_file(tmp_path / "run.yaml", {"parallel.tp": 2, "run.steps": 100, "parallel.timeout_seconds": 2})
    arguments = ["--config", str(config), f"run.dir={tmp_path / 'run'}"]
    with Job(arguments, 2, tmp_path / "logs", (__name__, "rank_1_sleeps_in_step_3")) as job:
        until(lambda: len(metrics(tmp_path / "run")) >= 2)
        hung = time.monotonic()
        until(lambda: job.processes[0].exitcode is not None, 20)
        assert 1 < time.monotonic() - hung < 15
        assert job.processes[0].exitcode not in (0, 2, 3)
    assert status(tmp_path / "run")["state"] == "failed"
