"""Whatever dies at whatever instant of a save or a removal, the newest whole checkpoint loads and is the
right one."""

import os
import signal
from pathlib import Path

import pytest
import torch
from checkpoint_cases import ThreadWorld, empty_like, header, same_bits, state, whole_boxes

from ultrascale.checkpoint import folder as folders
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import (
    checkpoints,
    latest,
    remove,
    retain,
    set_aside,
    set_aside_after,
    sweep,
    torn,
)
from ultrascale.checkpoint.read import load
from ultrascale.checkpoint.write import save

POINTS = ["open", "write", "sync", "gather", "manifest", "rename", "renamed"]


def save_step(root: Path, step: int, probe=None) -> Path:
    path = root / folders.folder_name(step)
    save(path, whole_boxes(state(seed=step)), header(step), probe=probe)
    return path


def assert_latest_is(root: Path, step: int) -> None:
    newest = latest(root)
    assert newest is not None
    assert newest.name == folders.folder_name(step)
    loaded = empty_like(state())
    assert load(newest, whole_boxes(loaded)).step == step
    assert all(same_bits(loaded[n], t) for n, t in state(seed=step).items())


def killed(work) -> None:
    """Runs the work in a child process that kills itself with SIGKILL at the probe's call; nothing is cleaned
    up."""
    child = os.fork()
    if child == 0:
        try:
            work(lambda: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child was to die at the probe, and did not get there"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_of_a_save_the_newest_whole_checkpoint_is_right(tmp_path, point, nth):
    if nth > 1 and point != "write":
        nth = 1
    save_step(tmp_path, 5)
    before = {p: p.read_bytes() for p in sorted((tmp_path / "step-00000005").iterdir())}

    def work(die):
        calls = []

        def probe(at):
            calls.append(at)
            if calls.count(point) == nth and at == point:
                die()

        save_step(tmp_path, 10, probe)

    killed(work)
    assert_latest_is(tmp_path, 10 if point == "renamed" else 5)
    assert {p: p.read_bytes() for p in sorted((tmp_path / "step-00000005").iterdir())} == before
    left = sweep(tmp_path)
    assert len(left) == (0 if point == "renamed" else 1)
    assert {p.name for p in tmp_path.iterdir()} <= {"step-00000005", "step-00000010"}
    if point != "renamed":
        save_step(tmp_path, 10)  # nothing that the dead one left is in the way
    assert_latest_is(tmp_path, 10)


@pytest.mark.parametrize("point", POINTS[:-1])
def test_an_error_at_any_point_of_a_save_is_loud_and_touches_nothing_else(tmp_path, point):
    save_step(tmp_path, 5)

    def probe(at):
        if at == point:
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"not saved.*No space left on device"):
        save_step(tmp_path, 10, probe)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    assert_latest_is(tmp_path, 5)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("point", ["open", "write", "sync"])
def test_an_error_on_one_rank_reaches_all_ranks_and_says_which(tmp_path, monkeypatch, bad, point):
    save_step(tmp_path, 5)

    def probe(at):
        if at == point:
            raise OSError(28, "No space left on device")

    ranks = [whole_boxes({f"t{i}": torch.ones(3)}) for i in range(3)]
    results = ThreadWorld(3, monkeypatch).save(tmp_path / "step-00000010", ranks, probes={bad: probe})
    for result in results:
        assert isinstance(result, CheckpointError)
        assert f"rank {bad}: OSError: [Errno 28] No space left on device" in str(result)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_a_rank_that_died_fails_the_save_on_those_that_are_left(tmp_path, monkeypatch):
    world = ThreadWorld(2, monkeypatch)
    world._barrier.abort()
    results = world.save(tmp_path / "c", [whole_boxes({"a": torch.ones(2)}), []])
    assert all("the other ranks did not answer" in str(r) for r in results), results
    assert list(tmp_path.iterdir()) == []


def test_a_whole_checkpoint_is_never_replaced(tmp_path):
    save_step(tmp_path, 5)
    with pytest.raises(CheckpointError, match="whole checkpoint already"):
        save(tmp_path / "step-00000005", whole_boxes(state(seed=99)), header(5))
    assert_latest_is(tmp_path, 5)


def test_a_whole_checkpoint_that_appears_during_a_save_is_not_replaced_either(tmp_path):
    ready = save_step(tmp_path / "elsewhere", 5)

    def probe(at):
        if at == "rename":
            ready.rename(tmp_path / "step-00000005")

    with pytest.raises(CheckpointError, match="whole checkpoint already"):
        save(tmp_path / "step-00000005", whole_boxes(state(seed=99)), header(5), probe=probe)
    assert_latest_is(tmp_path, 5)


def test_what_is_not_whole_and_in_the_way_is_set_aside_and_not_deleted(tmp_path):
    path = save_step(tmp_path, 5)
    (path / "manifest.json").unlink()
    save_step(tmp_path, 5)
    assert_latest_is(tmp_path, 5)
    aside = [p for p in tmp_path.iterdir() if ".set-aside-" in p.name]
    assert len(aside) == 1
    assert (aside[0] / "rank-00000.safetensors").exists()


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"not saved.*file"):
        save_step(tmp_path / "file", 5)


def test_latest_ignores_what_is_not_whole_and_says_why(tmp_path):
    assert latest(tmp_path / "nothing") is None
    save_step(tmp_path, 5)
    (tmp_path / "step-00000020").mkdir()
    (tmp_path / "step-00000030").write_text("a file")
    save_step(tmp_path, 6).rename(tmp_path / "step-00000040")
    (tmp_path / "step-9").mkdir()
    (tmp_path / ".step-00000050.tmp-000000000000").mkdir()
    assert_latest_is(tmp_path, 5)
    reasons = [str(r) for r in torn(tmp_path)]
    assert len(reasons) == 2
    assert "step-00000040: its manifest is of step 6" in reasons[0]
    assert "step-00000020 is not a checkpoint: manifest.json cannot be read" in reasons[1]


def test_steps_are_ordered_by_number_and_not_by_name(tmp_path):
    for step in (99_999_999, 100_000_000):
        save_step(tmp_path, step)
    assert_latest_is(tmp_path, 100_000_000)


def test_retention_keeps_the_newest_whole_ones_and_counts_no_others(tmp_path):
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    assert [p.name for p in retain(tmp_path, 2)] == ["step-00000001"]
    assert retain(tmp_path, None) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]
    retain(tmp_path, 1)
    assert_latest_is(tmp_path, 3)
    with pytest.raises(CheckpointError, match="keep=0: at least 1"):
        retain(tmp_path, 0)


def test_the_only_whole_checkpoint_cannot_be_removed(tmp_path):
    save_step(tmp_path, 1)
    (tmp_path / "step-00000002").mkdir()
    with pytest.raises(CheckpointError, match="only whole checkpoint"):
        remove(tmp_path / "step-00000001")
    remove(tmp_path / "step-00000002")
    assert_latest_is(tmp_path, 1)


@pytest.mark.parametrize("point", ["trash", "trashed"])
def test_killed_during_a_removal_no_half_deleted_checkpoint_is_offered(tmp_path, point):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)

    def work(die):
        remove(tmp_path / "step-00000001", probe=lambda at: die() if at == point else None)

    killed(work)
    assert [p.name for p in checkpoints(tmp_path)] == (
        ["step-00000002", "step-00000001"] if point == "trash" else ["step-00000002"]
    )
    sweep(tmp_path)
    retain(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_a_run_that_goes_back_does_not_resume_into_its_old_future(tmp_path):
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    assert len(set_aside_after(tmp_path, 1)) == 2
    assert_latest_is(tmp_path, 1)
    save_step(tmp_path, 2)
    assert_latest_is(tmp_path, 2)
    set_aside(tmp_path / "step-00000002")
    assert_latest_is(tmp_path, 1)
