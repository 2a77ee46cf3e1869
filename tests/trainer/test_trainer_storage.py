"""A run whose checkpoints are copied to storage goes on from there, and never stops because storage does (K2)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from trainer_cases import checkpoints, codes, files, lines, numbers, status, train, until

from ultrascale.checkpoint import storage as storages
from ultrascale.checkpoint.storage import Storage

SETTINGS = {"checkpoint.every": 2, "checkpoint.keep": 2, "run.steps": 6}


def events(folder: Path, *names: str) -> list[tuple[str, int]]:
    return [(e["event"], e.get("step")) for e in lines(folder / "events.jsonl") if e["event"] in names]


@pytest.mark.parametrize(
    ("world", "layout"), [(1, {}), (2, {"parallel.dp": 2, "parallel.zero_stage": 1})], ids=["1 process", "2 processes"]
)
def test_a_run_whose_folder_is_lost_goes_on_from_storage_as_the_unbroken_one(
    tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    remote = tmp_path / "remote"
    settings = {**SETTINGS, **layout, "checkpoint.storage": f"file://{remote}", "checkpoint.keep_every": 2}
    assert codes(train(world, tmp_path / "run", {**settings, "run.steps": 4, "checkpoint.keep": 1})) == {0}
    assert events(tmp_path / "run", "upload", "upload_failed") == [("upload", 2), ("upload", 4)]
    assert files(remote) == {
        name: data for name, data in files(tmp_path / "run" / "checkpoints").items() if name != "latest"
    }

    shutil.rmtree(tmp_path / "run")
    resumed = train(world, tmp_path / "run", settings)
    assert codes(resumed) == {0}
    assert events(tmp_path / "run", "download", "resume", "upload") == [("download", 4), ("resume", 4), ("upload", 6)]
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]
    whole = train(world, tmp_path / "whole", {**SETTINGS, **layout})
    assert [rank.state for rank in resumed] == [rank.state for rank in whole]
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")[4:]


def storage_is_away(rank: int) -> Any:
    def put(self: Storage, folder: Path) -> bool:
        raise OSError(f"no route to {self}")

    return patch.object(Storage, "put", put)


def test_storage_that_cannot_be_reached_costs_no_step_and_no_local_save_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SETTINGS, "checkpoint.storage": f"file://{tmp_path / 'remote'}"}
    (outcome,) = train(1, tmp_path / "run", settings, [storage_is_away])
    assert outcome.code == 0
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]
    failed = events(tmp_path / "run", "upload", "upload_failed", "upload_skipped")
    assert failed[-1] == ("upload_failed", 6)
    assert all(name != "upload" for name, _ in failed)
    assert "notice: step 6 is not on storage: no route to file://" in capsys.readouterr().out

    # What is missing there is sent when it is back, though there is nothing left to train.
    assert codes(train(1, tmp_path / "run", settings)) == {0}
    assert events(tmp_path / "run", "upload") == [("upload", 6)]
    assert sorted(path.name for path in (tmp_path / "remote").iterdir()) == ["step-00000006"]


def test_a_checkpoint_is_kept_here_until_it_is_there(tmp_path: Path) -> None:
    original, run = Storage.put, tmp_path / "run"
    seen = []

    def slow(self: Storage, folder: Path) -> bool:
        until(lambda: "step-00000004" in checkpoints(run))
        seen.append(checkpoints(run))
        return original(self, folder)

    settings = {**SETTINGS, "checkpoint.every": 1, "checkpoint.keep": 1, "run.steps": 4}
    settings["checkpoint.storage"] = f"file://{tmp_path / 'remote'}"
    with patch.object(Storage, "put", slow):
        assert codes(train(1, run, settings)) == {0}
    assert "step-00000001" in seen[0], "it was being copied, and is not among the newest"
    assert events(run, "upload", "upload_failed") == [("upload", 1), ("upload", 4)]
    assert events(run, "upload_skipped") == [("upload_skipped", 2), ("upload_skipped", 3)]
    assert checkpoints(run) == ["step-00000004"], "and then it goes"
    assert [path.name for path in (tmp_path / "remote").iterdir()] == ["step-00000004"]


def test_the_newest_on_storage_that_is_damaged_is_passed_over_and_said(tmp_path: Path) -> None:
    settings = {**SETTINGS, "checkpoint.storage": f"file://{tmp_path / 'remote'}"}
    train(1, tmp_path / "run", settings)
    file = tmp_path / "remote" / "step-00000006" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    shutil.rmtree(tmp_path / "run")
    assert codes(train(1, tmp_path / "run", settings)) == {0}
    assert events(tmp_path / "run", "checkpoint_passed_over", "resume")[-1] == ("resume", 4)
    reason = next(e for e in lines(tmp_path / "run" / "events.jsonl") if e["event"] == "checkpoint_passed_over")[
        "reason"
    ]
    assert "step-00000006" in reason
    assert "does not match: damaged" in reason


def test_a_start_that_cannot_ask_storage_is_refused_because_what_is_here_may_be_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storages, "PAUSES", ())
    settings = {**SETTINGS, "checkpoint.storage": f"file://{tmp_path / 'remote'}"}
    train(1, tmp_path / "run", {**settings, "run.steps": 4})

    def listing(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    (tmp_path / "remote").mkdir(exist_ok=True)
    with patch("fsspec.implementations.local.LocalFileSystem.ls", listing):
        (outcome,) = train(1, tmp_path / "run", settings)
    assert outcome.code == 2
    assert "cannot list: OSError: no route" in capsys.readouterr().err
    assert status(tmp_path / "run")["state"] == "failed"


def test_never_resume_into_a_folder_is_refused_when_storage_holds_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SETTINGS, "checkpoint.storage": f"file://{tmp_path / 'remote'}"}
    train(1, tmp_path / "run", settings)
    (outcome,) = train(1, tmp_path / "other", {**settings, "run.resume": "never"})
    assert outcome.code == 2
    said = capsys.readouterr().err
    assert "holds checkpoints of a run, up to step-00000006, and run.resume=never wants none" in said


def test_a_run_that_went_back_does_not_come_from_its_old_future_on_storage(tmp_path: Path) -> None:
    settings = {**SETTINGS, "checkpoint.keep": None, "checkpoint.storage": f"file://{tmp_path / 'remote'}"}
    train(1, tmp_path / "run", settings)
    back = {**settings, "run.resume": str(tmp_path / "run" / "checkpoints" / "step-00000002"), "run.steps": 3}
    assert codes(train(1, tmp_path / "run", back)) == {0}
    shutil.rmtree(tmp_path / "run")
    assert codes(train(1, tmp_path / "run", settings)) == {0}
    assert events(tmp_path / "run", "resume") == [("resume", 3)]
