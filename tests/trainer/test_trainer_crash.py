"""SIGKILL at any instant of a save, of one rank or of all, in the save itself or beside training: what is whole
afterwards is right, and the run goes on from there as if nothing had been (K2; BL-083,
Lightning-AI/pytorch-lightning#688: a half-written folder was picked up at every restart)."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import Job, codes, metrics, train, until, yaml_file

from ultrascale.checkpoint import folder as folders
from ultrascale.checkpoint import snapshots
from ultrascale.checkpoint.folder import folder_name, is_whole, latest, step_of
from ultrascale.checkpoint.manifest import read_manifest

LAYOUT = {"parallel.dp": 2, "parallel.zero_stage": 1}
SETTINGS = {**LAYOUT, "checkpoint.every": 1, "checkpoint.keep": 2}
OF_A_RANK, OF_RANK_0 = ("open", "write", "sync"), ("gather", "manifest", "rename", "renamed", "trash", "trashed")
STEP = 4
"""In whose save the process dies: by then there is an old checkpoint to remove."""
LAST = 9
"""Of the run that nothing happens to."""


def dies(rank: int, victim: int, point: str, nth: int) -> None:
    """The victim kills itself at the nth time that the save of STEP, or the removal after it, comes to this point."""
    if rank != victim:
        return
    save, remove, saving, left = snapshots.save, folders.remove, [0], [nth]

    def probe(at: str) -> None:
        if saving[0] == STEP and at == point:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def watched_save(folder: Path, boxes: Any, header: Any, group: Any) -> int:
        saving[0] = header["step"]
        return save(folder, boxes, header, group, probe=probe)

    snapshots.save = watched_save  # type: ignore[assignment]
    folders.remove = lambda path: remove(path, probe=probe)  # type: ignore[assignment]


def is_slow(rank: int) -> None:
    """Each point of a save and of a removal takes some milliseconds, so that most instants lie in one."""
    save, remove = snapshots.save, folders.remove

    def probe(at: str) -> None:
        time.sleep(0.002 if at == "write" else 0.01)

    snapshots.save = lambda *arguments: save(*arguments, probe=probe)  # type: ignore[assignment]
    folders.remove = lambda path: remove(path, probe=probe)  # type: ignore[assignment]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same settings that nothing happened to, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("unbroken")
    settings = {**SETTINGS, "checkpoint.keep": None, "checkpoint.asynchronous": False, "run.steps": LAST}
    assert codes(train(2, folder / "run", settings)) == {0}
    return folder / "run"


def assert_whole_ones_are_right(folder: Path, unbroken: Path) -> int:
    """Every whole checkpoint of a run that was killed holds, to the byte, what the unbroken run saved at its step;
    returns the newest one's step."""
    newest = latest(folder / "checkpoints")
    assert newest is not None
    for found in (folder / "checkpoints").glob("step-*"):
        if not is_whole(found) or step_of(found) > LAST:
            continue
        expected = unbroken / "checkpoints" / found.name
        one, other = read_manifest(found), read_manifest(expected)
        assert one.tensors == other.tensors, found
        assert one.header["data_position"] == other.header["data_position"], found
        for name in one.files:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), f"{found / name}"
    return step_of(newest)


def goes_on(folder: Path, steps: int, tmp_path: Path) -> None:
    resumed = train(2, folder, {**SETTINGS, "run.steps": steps})
    assert codes(resumed) == {0}
    whole = train(2, tmp_path / "whole", {**LAYOUT, "run.steps": steps, "checkpoint.every": 0, "checkpoint.keep": None})
    assert [rank.state for rank in resumed] == [rank.state for rank in whole]
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"latest", *(folder_name(step) for step in (steps - 1, steps))}


def killed_at(point: str, victim: int, nth: int, beside: bool, tmp_path: Path, unbroken: Path) -> None:
    settings = {**SETTINGS, "checkpoint.asynchronous": beside, "run.steps": 100_000}
    config, folder = yaml_file(tmp_path / "run.yaml", settings), tmp_path / "run"
    fault = (__name__, "dies", victim, point, nth)
    with Job(["--config", str(config), f"run.dir={folder}"], 2, tmp_path / "logs", fault) as job:
        ends = job.wait(40)
    assert ends[victim] == -signal.SIGKILL, f"rank {victim} was to die at {point}: {ends}"
    assert ends[1 - victim] not in (None, 0, 2, 3), "the other rank finds out by itself"
    committed = point in ("renamed", "trash", "trashed")
    assert assert_whole_ones_are_right(folder, unbroken) == (STEP if committed else STEP - 1)
    goes_on(folder, STEP + 2, tmp_path)


CELLS = [(p, v, n) for p, v in itertools.product(OF_A_RANK, (0, 1)) for n in ((1, 3) if p == "write" else (1,))]
CELLS += [(point, 0, 1) for point in OF_RANK_0]
BY_DEFAULT = [("write", 1, 3, True), ("manifest", 0, 1, True), ("trashed", 0, 1, False)]


@pytest.mark.parametrize(
    ("point", "victim", "nth", "beside"),
    [
        pytest.param(*cell, beside, marks=() if (*cell, beside) in BY_DEFAULT else pytest.mark.prove)
        for cell, beside in itertools.product(CELLS, (False, True))
    ],
)
def test_a_rank_killed_at_any_point_of_a_save_leaves_what_is_right(
    point: str, victim: int, nth: int, beside: bool, tmp_path: Path, unbroken: Path
) -> None:
    killed_at(point, victim, nth, beside, tmp_path, unbroken)


def test_every_point_of_a_save_and_a_removal_is_among_the_cells() -> None:
    assert {point for point, _, _ in CELLS} == {*OF_A_RANK, *OF_RANK_0}
    assert all(cell in [(*c, b) for c, b in itertools.product(CELLS, (False, True))] for cell in BY_DEFAULT)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside training"])
def test_killed_at_a_random_instant_what_is_whole_is_right(
    seed: int, beside: bool, tmp_path: Path, unbroken: Path
) -> None:
    """Odd seeds kill one rank, even ones all, as a host that dies."""
    draw = random.Random(seed)
    settings = {**SETTINGS, "checkpoint.asynchronous": beside, "run.steps": 100_000}
    config, folder = yaml_file(tmp_path / "run.yaml", settings), tmp_path / "run"
    with Job(["--config", str(config), f"run.dir={folder}"], 2, tmp_path / "logs", (__name__, "is_slow")) as job:
        until(lambda: len(metrics(folder)) >= 3)
        time.sleep(draw.uniform(0, 0.5))
        for rank in [draw.randrange(2)] if seed % 2 else [0, 1]:
            job.send(rank, signal.SIGKILL)
        assert None not in job.wait(40)
    goes_on(folder, assert_whole_ones_are_right(folder, unbroken) + 2, tmp_path)
