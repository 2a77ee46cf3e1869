"""Which checkpoints are removed is decided by which are whole, and `latest` names the newest of those."""

import os
from pathlib import Path

import pytest
from checkpoint_cases import header, state, whole_boxes

from ultrascale.checkpoint.folder import (
    POINTER,
    folder_name,
    latest,
    point_to,
    remove,
    retain,
    surplus,
    sweep,
)
from ultrascale.checkpoint.manifest import MANIFEST
from ultrascale.checkpoint.write import save


def saved(root: Path, *steps: int) -> list[Path]:
    for step in steps:
        save(root / folder_name(step), whole_boxes(state(seed=step)), header(step))
    return [root / folder_name(step) for step in steps]


def left(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


@pytest.mark.parametrize(
    ("keep", "keep_every", "stay"),
    [
        (1, None, [9]),
        (2, None, [8, 9]),
        (1, 3, [3, 6, 9]),
        (2, 4, [4, 8, 9]),
        (3, 100, [7, 8, 9]),
        (1, 1, list(range(1, 10))),
        (None, 3, list(range(1, 10))),
        (20, None, list(range(1, 10))),
    ],
)
def test_the_newest_and_those_of_every_so_many_steps_stay(keep, keep_every, stay):
    newest_first = [Path(folder_name(step)) for step in range(9, 0, -1)]
    gone = surplus(newest_first, keep, keep_every)
    assert sorted({*range(1, 10)} - {int(f.name.removeprefix("step-")) for f in gone}) == stay
    assert gone == sorted(gone)  # oldest first


def test_what_is_removed_on_disk_is_what_is_surplus_but_for_what_is_spared(tmp_path):
    saved(tmp_path, 1, 2, 3, 4, 5)
    assert [f.name for f in retain(tmp_path, 1, 2, spare=["step-00000003"])] == ["step-00000001"]
    assert left(tmp_path) == [2, 3, 4, 5]
    retain(tmp_path, 1, 2)
    assert left(tmp_path) == [2, 4, 5]


@pytest.mark.parametrize("harm", ["no manifest", "a cut file", "an empty folder", "an edited manifest"])
def test_a_newest_one_that_is_broken_costs_none_that_is_whole(tmp_path, harm):
    one, _, newest = saved(tmp_path, 1, 2, 3)
    file, manifest = newest / "rank-00000.safetensors", newest / MANIFEST
    if harm == "no manifest":
        manifest.unlink()
    elif harm == "a cut file":
        os.truncate(file, file.stat().st_size - 1)
    elif harm == "an empty folder":
        file.unlink(), manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 4'))
    retain(tmp_path, 1)
    assert left(tmp_path) == [2, 3]
    assert latest(tmp_path) == tmp_path / "step-00000002"
    with pytest.raises(Exception, match="only whole checkpoint"):
        remove(tmp_path / "step-00000002")
    assert not one.exists()


def test_the_pointer_names_the_newest_and_a_stale_one_misleads_nobody(tmp_path):
    one, two = saved(tmp_path, 1, 2)
    point_to(tmp_path, one)
    assert (tmp_path / POINTER).read_text() == "step-00000001\n"
    assert latest(tmp_path) == two  # the folders say, and the pointer is one save behind
    point_to(tmp_path, two)
    assert (tmp_path / POINTER).read_text() == "step-00000002\n"
    (tmp_path / POINTER).write_text("../../elsewhere\n")
    assert latest(tmp_path) == two
    point_to(tmp_path, None)
    assert not (tmp_path / POINTER).exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_pointer_that_died_half_written_is_swept_and_the_old_one_stays(tmp_path, monkeypatch):
    one, two = saved(tmp_path, 1, 2)
    point_to(tmp_path, one)

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            point_to(tmp_path, two)
    assert (tmp_path / POINTER).read_text() == "step-00000001\n"
    assert len(sweep(tmp_path)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]
