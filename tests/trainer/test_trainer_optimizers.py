"""Runs with optimizers of several kinds go on bit for bit, and under other layouts within rounding; what the model has
no use for ends a run before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_cases import checkpoints, codes, files, numbers, status, tensors, train

from ultrascale.config.schema import ParameterGroup

SHARED = {"parallel.dp": 2, "parallel.zero_stage": 3}
MUON = {"optimizer.name": "muon"}
GROUPS = {
    "optimizer.groups": (
        ParameterGroup(match="layers.*.mlp.*", optimizer="muon", lr_scale=0.5),
        ParameterGroup(kind="norm", optimizer="sgd", momentum=0.5),
    )
}


def state_files(folder: Path) -> dict[str, bytes]:
    """The newest checkpoint's tensors, byte for byte."""
    newest = folder / "checkpoints" / checkpoints(folder)[-1]
    return {name: data for name, data in files(newest).items() if name.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {**MUON, **SHARED}),
        (2, {**GROUPS, **SHARED, "parallel.zero_stage": 1, "optimizer.state_dtype": "bfloat16"}),
    ],
    ids=["muon, zero 3", "groups, zero 1, bfloat16 moments"],
)
def test_a_run_that_stopped_goes_on_bit_for_bit(world: int, settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "checkpoint.every": 2}
    whole = train(world, tmp_path / "whole", {**settings, "run.steps": 4})
    first = train(world, tmp_path / "parts", {**settings, "run.steps": 2})
    second = train(world, tmp_path / "parts", {**settings, "run.steps": 4})
    assert codes(whole) == codes(first) == codes(second) == {0}
    assert sorted(second[0].samples) == [3, 4]
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "parts")
    assert state_files(tmp_path / "whole") == state_files(tmp_path / "parts")


def test_muon_goes_on_in_one_process_within_rounding(tmp_path: Path) -> None:
    settings = {**MUON, "precision.compute": "float64", "checkpoint.every": 2}
    train(1, tmp_path / "whole", {**settings, "run.steps": 4})
    train(2, tmp_path / "parts", {**settings, **SHARED, "run.steps": 2})
    (resumed,) = train(1, tmp_path / "parts", {**settings, "run.steps": 4})
    assert resumed.code == 0
    assert sorted(resumed.samples) == [3, 4]
    expected, found = (tensors(tmp_path / name / "checkpoints" / "step-00000004") for name in ("whole", "parts"))
    assert expected.keys() == found.keys()
    assert {name.split("/")[0] for name in expected if "/" in name} == {
        "optimizer.momentum", "optimizer.exp_avg", "optimizer.exp_avg_sq",
    }  # fmt: skip
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-9 * np.abs(values).max(), err_msg=name)


@pytest.mark.parametrize("settings", [{}, MUON, GROUPS], ids=["adamw", "muon", "groups"])
def test_stages_0_and_1_are_bitwise_equal(settings: dict[str, Any], tmp_path: Path) -> None:
    """In float32: shards cut flat memory, and what is computed from it has the same bits. Without clipping, for a norm
    is summed shard by shard."""
    settings = {**settings, "parallel.dp": 2, "optimizer.max_norm": None, "run.steps": 3, "checkpoint.every": 3}
    found = []
    for stage in (0, 1):
        train(2, tmp_path / str(stage), {**settings, "parallel.zero_stage": stage})
        found.append(tensors(tmp_path / str(stage) / "checkpoints" / "step-00000003"))
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        assert np.array_equal(values, found[1][name]), name


def test_moments_may_move_to_host_memory_between_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they lie is no part of what a run is; the format that they are held in is."""
    settings = {"checkpoint.every": 1}
    train(1, tmp_path, {**settings, "run.steps": 1})
    (resumed,) = train(1, tmp_path, {**settings, "run.steps": 2, "optimizer.offload": True})
    assert resumed.code == 0
    assert sorted(resumed.samples) == [2]
    assert "notice: optimizer.offload has no effect on cpu" in capsys.readouterr().out
    (refused,) = train(1, tmp_path, {**settings, "run.steps": 3, "optimizer.state_dtype": "bfloat16"})
    assert refused.code == 2
    assert "optimizer.state_dtype was None and is 'bfloat16'" in capsys.readouterr().err


def test_what_travels_for_matrices_is_in_the_ledger(tmp_path: Path) -> None:
    """Replicas that hold every matrix whole send nothing there, and each half of the matrices back to the other."""
    train(2, tmp_path, {**MUON, "parallel.dp": 2, "run.steps": 1})
    rows = [row for row in json.loads((tmp_path / "ledger.json").read_text()) if row["phase"] == "optimizer"]
    hidden, ffn, kv, layers = 16, 24, 8, 2
    matrices = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    assert [(row["op"], row["calls"], row["bytes"]) for row in rows] == [("all_to_all", 2, matrices // 2 * 4)]


def test_a_group_that_matches_nothing_ends_the_run_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ParameterGroup(match="layers.*.attn.*", lr_scale=0.5)
    outcomes = train(1, tmp_path, {"optimizer.groups": (group,), "run.steps": 1})
    assert codes(outcomes) == {2}
    said = "optimizer.groups[0].match=layers.*.attn.* matches no parameter; the nearest are layers.*"
    assert said in capsys.readouterr().err
    assert said in status(tmp_path)["reason"]
    assert not (tmp_path / "metrics.jsonl").exists()
