"""What other programs rely on: exit codes and the files of a run folder, with their keys (DESIGN §5)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from trainer_cases import BASE, Job, checkpoints, codes, files, lines, metrics, numbers, status, train, yaml_file

from small import config_of
from ultrascale.comm.ledger import Ledger
from ultrascale.mesh.axes import Mesh
from ultrascale.pipeline.actions import COMPUTE
from ultrascale.pipeline.program import program

KEYS = {
    "step", "loss", "lm_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_time_s", "mfu", "peak_memory_bytes",
}  # fmt: skip
LAYOUT = {"parallel.tp": 2, "parallel.pp": 2, "batch.micro_size": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps under tp2·pp2, with everything on that a run folder can show."""
    folder = tmp_path_factory.mktemp("contract") / "run"
    settings = {
        **LAYOUT,
        "run.steps": 4,
        "checkpoint.every": 2,
        "evaluation.every": 2,
        "evaluation.batches": 1,
        "profile.timeline": True,
        "model.z_loss_coefficient": 0.1,
    }
    assert codes(train(4, folder, settings)) == {0}
    return folder


def test_a_run_folder_holds_these_files_and_no_others(run: Path) -> None:
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "manifest.json", "status.json", "metrics.jsonl", "events.jsonl", "ledger.json", "checkpoints",
        "run.lock",
        "timeline-0.jsonl", "timeline-1.jsonl", "timeline-2.jsonl", "timeline-3.jsonl",
    }  # fmt: skip
    assert checkpoints(run) == ["step-00000002", "step-00000004"]
    assert [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")] == ["latest"]


def test_metrics_have_one_line_per_step_with_the_named_keys_in_full_precision(run: Path) -> None:
    found = metrics(run)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for line in found:
        expected = KEYS | {"aux_z"} | ({"validation_loss"} if line["step"] % 2 == 0 else set())
        assert set(line) == expected
        assert line["tokens"] == line["step"] * 4 * 8  # global_size sequences of sequence_length tokens
        assert line["tokens_per_s"] == pytest.approx(4 * 8 / line["step_time_s"])
        assert line["mfu"] is None  # no peak is known of a CPU
        assert line["peak_memory_bytes"] > 10_000_000
        # L6: `loss` is what was differentiated, with the terms apart.
        assert line["loss"] == pytest.approx(line["lm_loss"] + 0.1 * line["aux_z"], rel=1e-12)
    assert any(len(repr(line["loss"])) >= 15 for line in found)


def test_the_logged_loss_is_the_objective_whose_gradient_is_applied(tmp_path: Path) -> None:
    """Two steps of plain SGD with a tiny rate: the loss falls by lr · norm², to first order. Any factor would show."""
    lr = 1e-6
    settings = {
        "optimizer.name": "sgd",
        "optimizer.lr": lr,
        "optimizer.weight_decay": 0.0,
        "optimizer.max_norm": None,
        "precision.compute": "float64",
        "model.label_smoothing": 0.1,
        "model.z_loss_coefficient": 0.1,
        "data.train": "builtin:uneven",
        "run.steps": 2,
    }
    # The same samples in both steps, so that the difference is the update's alone.
    train(1, tmp_path / "run", settings, [the_same_batch_every_step])
    first, second = metrics(tmp_path / "run")
    assert first["loss"] - second["loss"] == pytest.approx(lr * first["grad_norm"] ** 2, rel=1e-3)


def the_same_batch_every_step(rank: int) -> Any:
    from unittest.mock import patch

    from ultrascale import trainer

    original = trainer.Trainer._arrays
    return patch.object(trainer.Trainer, "_arrays", lambda self, step: original(self, 1))


def test_the_first_loss_is_that_of_a_uniform_guess(tmp_path: Path) -> None:
    train(1, tmp_path / "run", {"run.steps": 1, "model.initializer_range": 0.002})
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(math.log(131), rel=0.01)


def test_the_manifest_says_where_every_rank_stood(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["world_size"] == 4
    assert manifest["axes"] == {"pp": 2, "dp": 1, "ep": 1, "cp": 1, "tp": 2}
    assert manifest["order"] == ["pp", "dp", "ep", "cp", "tp"]
    assert [rank["rank"] for rank in manifest["ranks"]] == [0, 1, 2, 3]
    places = [(rank["coordinates"]["pp"], rank["coordinates"]["tp"]) for rank in manifest["ranks"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(rank["host"] and rank["device"] == "cpu" for rank in manifest["ranks"])
    assert {tuple(group["axes"]) for group in manifest["groups"]} >= {("tp",), ("pp",)}
    assert manifest["schedule"] == {"name": "1f1b", "stages": 2, "micro_batches": 4, "layers": [[0], [1]]}
    assert manifest["precision"] == dict.fromkeys(("compute", "master", "accumulate", "reduce"), "float32")
    assert set(manifest["versions"]) == {"ultrascale", "torch", "python"}
    # h=16, 4 query and 2 KV heads of 4, ffn 24, two layers, tied vocabulary of 131.
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24 + 2 * 16
    assert manifest["parameters"] == 2 * layer + 131 * 16 + 16


def test_config_yaml_is_the_resolved_config_and_status_the_end(run: Path) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    assert tree["parallel"]["dp"] == 1
    assert tree["model"]["head_dim"] == 4
    assert status(run) == {"state": "finished", "step": 4, "reason": None, "exit_code": 0}
    events = lines(run / "events.jsonl")
    assert [event["event"] for event in events] == ["start", "checkpoint", "checkpoint", "memory", "finish"]
    assert all(event["time"] > 1e9 for event in events)


def test_the_ledger_has_a_row_for_each_kind_of_call_of_one_step(run: Path) -> None:
    rows = json.loads((run / "ledger.json").read_text())
    assert rows
    assert all(set(row) == {"axes", "op", "phase", "calls", "bytes"} for row in rows)
    kinds = {(tuple(row["axes"]), row["op"], row["phase"]): row for row in rows}
    assert len(kinds) == len(rows)
    # Rank 0 is the first of two stages: 4 activations of [8 / tp, 1, 16] floats go out, 4 gradients come back.
    sent = kinds[("pp",), "send", "forward"]
    assert (sent["calls"], sent["bytes"]) == (4, 4 * (8 // 2) * 16 * 4)
    assert kinds[("pp",), "receive", "backward"]["calls"] == 4
    # Norms, losses, stop flags and memory of the whole step in one message over the world.
    assert kinds[("pp", "tp"), "all_gather", "step"]["calls"] == 1
    assert not [kind for kind in kinds if kind[2] in ("evaluation", "checkpoint", "check")]


def test_a_run_of_one_process_has_an_empty_ledger(tmp_path: Path) -> None:
    train(1, tmp_path / "run", {"run.steps": 1})
    assert json.loads((tmp_path / "run" / "ledger.json").read_text()) == []


def test_the_timeline_shows_the_actions_of_the_plan_in_order_on_every_rank(run: Path) -> None:
    plan = program("1f1b", 2, 4)
    mesh = Mesh.of(config_of({**BASE, **LAYOUT}, 4))
    for rank in range(4):
        found = lines(run / f"timeline-{rank}.jsonl")
        assert all(set(line) == {"step", "kind", "stage", "micro_batch", "start", "end", "action"} for line in found)
        planned = [
            (str(action.kind), action.stage, action.micro_batch)
            for action in plan.actions[mesh.index(rank, ["pp"])]
            if action.kind in COMPUTE
        ]
        assert len(planned) == 8
        for step in range(1, 5):
            executed = [line for line in found if line["step"] == step]
            assert [(line["kind"], line["stage"], line["micro_batch"]) for line in executed] == planned
            times = [time for line in executed for time in (line["start"], line["end"])]
            assert times == sorted(times)


def test_without_profile_timeline_there_is_none(tmp_path: Path) -> None:
    train(1, tmp_path / "run", {"run.steps": 1})
    assert not list((tmp_path / "run").glob("timeline*"))


def test_a_finished_run_started_again_exits_0_and_keeps_every_number(run: Path) -> None:
    kept = ("metrics.jsonl", "checkpoints", "config.yaml", "ledger.json", "timeline")
    before = {name: data for name, data in files(run).items() if name.startswith(kept)}
    settings = {**LAYOUT, "run.steps": 4, "checkpoint.every": 2, "evaluation.every": 2, "evaluation.batches": 1}
    again = {**settings, "profile.timeline": True, "model.z_loss_coefficient": 0.1}
    outcomes = train(4, run, again)
    assert codes(outcomes) == {0}
    assert not any(rank.samples for rank in outcomes)
    assert {name: data for name, data in files(run).items() if name.startswith(kept)} == before
    assert status(run) == {"state": "finished", "step": 4, "reason": None, "exit_code": 0}
    # A shorter run is one that is finished already, too.
    assert codes(train(4, run, {**again, "run.steps": 3})) == {0}
    assert {name: data for name, data in files(run).items() if name.startswith(kept[:2])} == {
        name: data for name, data in before.items() if name.startswith(kept[:2])
    }


@pytest.mark.parametrize(
    ("every", "steps", "saved"), [(0, 3, []), (2, 5, [2, 4, 5]), (2, 4, [2, 4]), (10, 3, [3])], ids=str
)
def test_checkpoints_are_saved_every_so_often_and_at_the_end_or_never(
    every: int, steps: int, saved: list[int], tmp_path: Path
) -> None:
    settings = {"run.steps": steps, "checkpoint.every": every} | ({"checkpoint.keep": None} if every else {})
    train(1, tmp_path / "run", settings)
    assert checkpoints(tmp_path / "run") == [f"step-{step:08d}" for step in saved]
    if every == 2:
        train(1, tmp_path / "one", {**settings, "checkpoint.keep": 1})
        assert checkpoints(tmp_path / "one") == [f"step-{steps:08d}"]


def test_exit_codes_of_real_processes_are_0_2_and_0_again(tmp_path: Path) -> None:
    config = yaml_file(tmp_path / "run.yaml", {"run.steps": 2, "checkpoint.every": 1, "parallel.dp": 2})
    for more, code in (([], 0), (["model.hidden_sise=3"], 2), (["run.resume=never"], 2), ([], 0)):
        with Job(["--config", str(config), f"run.dir={tmp_path / 'run'}", *more], 2, tmp_path / "logs") as job:
            assert job.wait() == [code, code]
            if code == 2:
                assert job.said(0).count("\n") == 1, job.said(0)
                assert job.said(1) == ""  # said once for each host
    assert status(tmp_path / "run") == {"state": "finished", "step": 2, "reason": None, "exit_code": 0}


def test_a_checkpoint_names_step_config_position_axes_ties_and_every_tensor(run: Path) -> None:
    manifest = json.loads((run / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert {"schema_version", "step", "config", "data_position", "axes", "ties", "tensors"} <= manifest.keys()
    assert manifest["step"] == 4
    assert manifest["data_position"]["samples"] == 16
    assert manifest["axes"] == {"pp": 2, "dp": 1, "ep": 1, "cp": 1, "tp": 2}
    assert all(set(entry) == {"shape", "dtype", "shards"} for entry in manifest["tensors"].values())
    assert all(
        set(shard) == {"file", "key", "offset", "shape", "checksum"}
        for entry in manifest["tensors"].values()
        for shard in entry["shards"]
    )
    # A tied parameter is stored once, and each has its two moments.
    logical = [name for name in manifest["tensors"] if "/" not in name]
    assert len(manifest["tensors"]) == 3 * len(logical)
    assert [name for name in logical if manifest["tensors"][name]["shape"] == [131, 16]] == ["embed_tokens.weight"]


def test_numbers_of_metrics_do_not_depend_on_what_is_recorded(tmp_path: Path) -> None:
    train(1, tmp_path / "plain", {"run.steps": 3})
    train(1, tmp_path / "watched", {"run.steps": 3, "profile.timeline": True, "checkpoint.every": 1})
    assert numbers(tmp_path / "plain") == numbers(tmp_path / "watched")
    assert Ledger().summary() == []
    assert torch.is_grad_enabled()


def test_two_hosts_of_two_processes_are_one_job_of_four(tmp_path: Path) -> None:
    """BL-010: a step's tokens come from the mesh, not from how many processes a host has."""
    config = yaml_file(tmp_path / "run.yaml", {"run.steps": 2, "parallel.tp": 2})  # dp: what is left of the world
    arguments = ["--config", str(config)]
    for name, per_host in (("two", 2), ("one", 4)):
        folder = tmp_path / name
        with Job([*arguments, f"run.dir={folder}"], 4, tmp_path / "logs", per_host=per_host) as job:
            assert job.wait() == [0, 0, 0, 0]
        assert json.loads((folder / "manifest.json").read_text())["axes"]["dp"] == 2
        assert [line["tokens"] for line in metrics(folder)] == [4 * 8, 2 * 4 * 8]
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
