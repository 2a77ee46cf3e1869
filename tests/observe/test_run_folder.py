"""The run folder belongs to one run, and its files are whole and exact whatever happens."""

import json
import math
import os
import resource
import signal

import pytest
import yaml

from ultrascale.observe.run_folder import METRICS, RunFolder, RunFolderError

THIS, OTHER = {"run": {"seed": 1, "steps": 5}}, {"run": {"seed": 2, "steps": 5}}


def record(step: int, **more):
    values = {
        "loss": 2.5 / step,
        "lm_loss": 0.1 + 0.2,
        "lr": 3e-4,
        "grad_norm": 1 / 3,
        "tokens": 1024 * step,
        "tokens_per_s": 1e3,
        "step_time_s": 0.25,
        "mfu": None,
        "peak_memory_bytes": 1 << 33,
    }
    return {"step": step, **values, **more}


def lines(path):
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def run_with(path, steps, **options) -> RunFolder:
    folder = RunFolder(path, config=THIS, **options)
    for step in steps:
        folder.metrics(record(step))
    return folder


def test_metrics_hold_one_object_per_step_in_full_precision_and_nothing_else(tmp_path):
    folder = run_with(tmp_path / "r", [1, 2])
    folder.metrics(record(3, validation_loss=2.0, aux_balance=0.01))
    folder.event("saved", step=3, seconds=0.5)
    found = lines(tmp_path / "r" / "metrics.jsonl")
    assert found == [record(1), record(2), record(3, validation_loss=2.0, aux_balance=0.01)]
    assert all(list(line)[: len(METRICS)] == list(METRICS) for line in found)
    (event,) = lines(tmp_path / "r" / "events.jsonl")
    assert (event["event"], event["step"], event["seconds"]) == ("saved", 3, 0.5)


def test_a_line_that_is_repeated_of_the_past_or_incomplete_is_refused(tmp_path):
    folder = run_with(tmp_path / "r", [1, 2])
    for wrong in (record(2), record(1), {**record(3), "step": True}):
        with pytest.raises(ValueError, match="after those of step 2"):
            folder.metrics(wrong)
    bad = record(3)
    del bad["grad_norm"]
    with pytest.raises(ValueError, match=r"step 3: keys \['grad_norm'\] are missing"):
        folder.metrics(bad)
    assert [m["step"] for m in lines(tmp_path / "r" / "metrics.jsonl")] == [1, 2]


def test_values_that_json_does_not_have_are_null_and_told_in_the_events(tmp_path):
    folder = RunFolder(tmp_path / "r", config=THIS)
    folder.metrics(record(1, loss=math.nan, grad_norm=math.inf))
    (line,) = lines(tmp_path / "r" / "metrics.jsonl")
    assert line == record(1, loss=None, grad_norm=None)
    (event,) = lines(tmp_path / "r" / "events.jsonl")
    assert event["values"] == {"loss": "nan", "grad_norm": "inf"}


def test_on_resume_metrics_are_cut_back_to_the_step_of_the_checkpoint(tmp_path):
    path = tmp_path / "r" / "metrics.jsonl"
    run_with(tmp_path / "r", range(1, 8))
    folder = RunFolder(tmp_path / "r", config=THIS)
    folder.cut_back(5)
    assert [m["step"] for m in lines(path)] == [1, 2, 3, 4, 5]
    folder.metrics(record(6))
    assert [m["step"] for m in lines(path)] == [1, 2, 3, 4, 5, 6]
    folder.cut_back(0)
    assert path.read_bytes() == b""
    folder.metrics(record(1))


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_a_crash_tore_is_cut_away_before_anything_is_written(tmp_path, cut):
    for name in ("metrics.jsonl", "events.jsonl"):
        folder = run_with(tmp_path / name, [1, 2, 3])
        for i in range(3):
            folder.event("noted", step=i)
        path = tmp_path / name / name
        os.truncate(path, path.stat().st_size - cut)
        again = RunFolder(tmp_path / name, config=THIS)
        again.metrics(record(4))
        again.event("resumed")
        found = lines(path)
        assert len(found) == 3
        assert found[-1].get("step") == 4 or found[-1].get("event") == "resumed"


def test_damage_inside_the_metrics_does_not_survive_a_resume(tmp_path):
    path = tmp_path / "r" / "metrics.jsonl"
    run_with(tmp_path / "r", [1, 2, 3])
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\0\0\0\n" + second + second + b"[]\n" + third + b'{"step": "4"}\n{"st')
    RunFolder(tmp_path / "r", config=THIS).cut_back(3)
    assert path.read_bytes() == first + second + third


def test_a_long_torn_line_is_cut_away_whole(tmp_path):
    folder = RunFolder(tmp_path / "r", config=THIS)
    folder.event("first")
    with open(tmp_path / "r" / "events.jsonl", "ab") as file:
        file.write(b"x" * 200_000)
    RunFolder(tmp_path / "r", config=THIS)
    assert [e["event"] for e in lines(tmp_path / "r" / "events.jsonl")] == ["first"]


def test_status_config_manifest_and_ledger_are_replaced_whole(tmp_path):
    folder = RunFolder(tmp_path / "r", config={"run": {"steps": 5}, "optimizer": {"lr": 3e-4, "eps": 1e-8}})
    assert json.loads((tmp_path / "r" / "status.json").read_text())["state"] == "starting"
    folder.write_manifest({"world_size": 4})
    folder.write_ledger([{"axes": ["tp"], "op": "all_reduce", "phase": "forward", "calls": 4, "bytes": 64}])
    folder.status("stopped", 5, "SIGTERM", 3)
    assert yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())["optimizer"]["lr"] == 3e-4
    assert json.loads((tmp_path / "r" / "manifest.json").read_text()) == {"world_size": 4}
    assert json.loads((tmp_path / "r" / "ledger.json").read_text())[0]["bytes"] == 64
    status = json.loads((tmp_path / "r" / "status.json").read_text())
    assert {k: status[k] for k in ("state", "step", "reason", "exit_code")} == {
        "state": "stopped",
        "step": 5,
        "reason": "SIGTERM",
        "exit_code": 3,
    }
    with open(tmp_path / "r" / "status.json") as reader:
        folder.status("finished", 6, exit_code=0)
        assert json.load(reader)["state"] == "stopped", "a reader in the middle of it sees the old one whole"
    before = (tmp_path / "r" / "manifest.json").read_bytes()
    with pytest.raises(TypeError):
        folder.write_manifest({"world_size": object()})
    assert (tmp_path / "r" / "manifest.json").read_bytes() == before
    assert not [p for p in (tmp_path / "r").iterdir() if p.name.startswith(".")]


def test_a_folder_that_holds_a_different_run_is_refused_with_a_way_out(tmp_path):
    run_with(tmp_path / "r", [1])
    with pytest.raises(
        RunFolderError, match=r"run\.dir=.*r holds a different run: run\.seed was 1 and is 2; .*run\.dir=…"
    ):
        RunFolder(tmp_path / "r", config=OTHER)
    (tmp_path / "r" / "config.yaml").write_text("{")
    with pytest.raises(RunFolderError, match=r"config\.yaml cannot be read"):
        RunFolder(tmp_path / "r", config=THIS)
    assert len(lines(tmp_path / "r" / "metrics.jsonl")) == 1


def test_resume_never_refuses_a_folder_with_steps_or_checkpoints_and_takes_an_empty_one(tmp_path):
    RunFolder(tmp_path / "r", config=THIS, resume="never")
    # Died before its first step: nothing would be missed, whatever the config.
    folder = RunFolder(tmp_path / "r", config=OTHER, resume="never")
    folder.metrics(record(1))
    with pytest.raises(
        RunFolderError, match=r"run\.resume=never.*holds a run already; go on with it by run\.resume=auto"
    ):
        RunFolder(tmp_path / "r", config=OTHER, resume="never")
    RunFolder(tmp_path / "r", config=OTHER, resume="auto")
    RunFolder(tmp_path / "s", config=THIS)
    (tmp_path / "s" / "checkpoints" / "step-00000010").mkdir(parents=True)
    with pytest.raises(RunFolderError, match=r"run\.resume=never"):
        RunFolder(tmp_path / "s", config=THIS, resume="never")


def test_a_folder_that_cannot_be_written_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run", "/proc/run"):
        with pytest.raises(RunFolderError, match=r"run\.dir=.* cannot be written: .*; choose another folder"):
            RunFolder(path, config=THIS)


def test_a_checkpoint_is_not_taken_for_a_run_folder(tmp_path):
    (tmp_path / "manifest.json").write_text('{"schema_version": 1, "tensors": {}}')
    with pytest.raises(RunFolderError, match="is a checkpoint, not a run folder"):
        RunFolder(tmp_path, config=THIS)


def test_a_full_disk_is_told_with_a_way_out_and_leaves_the_old_files(tmp_path):
    folder = RunFolder(tmp_path / "r", config=THIS)
    folder.write_manifest({"a": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(RunFolderError, match=r"manifest\.json cannot be written: File too large; make room"):
            folder.write_manifest({"a": "x" * 1000})
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl cannot be written"):
            folder.metrics(record(1))
        assert 0 < (tmp_path / "r" / "metrics.jsonl").stat().st_size <= 100, "a torn line is what was meant"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert json.loads((tmp_path / "r" / "manifest.json").read_text()) == {"a": 1}
    RunFolder(tmp_path / "r", config=THIS).metrics(record(1))
    assert lines(tmp_path / "r" / "metrics.jsonl") == [record(1)]


def test_ranks_other_than_0_write_nothing(tmp_path):
    folder = RunFolder(tmp_path / "r", config=THIS, rank=3)
    folder.metrics(record(1))
    folder.event("noted")
    folder.status("running", 1)
    folder.write_manifest({})
    folder.write_ledger([])
    folder.cut_back(0)
    folder.sync()
    assert not (tmp_path / "r").exists()
    assert folder.checkpoints == tmp_path / "r" / "checkpoints"
