"""What a careless start or a bad end must not cost: a healthy checkpoint, another run's folder, an exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_cases import checkpoints, codes, metrics, status, train

from ultrascale.observe.run_folder import RunFolder, RunFolderError
from ultrascale.parallel.objective import Objective, Term

EVERY = {"checkpoint.every": 2, "checkpoint.keep": 5}


def harm(checkpoint: Path, byte: int | None) -> None:
    """Cuts the checkpoint's file short (None), or turns its last byte."""
    file = checkpoint / "rank-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-8] if byte is None else data[:-1] + bytes([data[-1] ^ byte]))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert codes(train(1, run, {"run.steps": 4, **EVERY})) == {0}
    for name in checkpoints(run):
        harm(run / "checkpoints" / name, None)
    assert codes(train(1, run, {"run.steps": 5, **EVERY})) == {2}
    assert "none is whole" in capsys.readouterr().err
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert checkpoints(run) == ["step-00000002", "step-00000004"]


def test_going_back_to_a_step_sets_later_ones_aside_only_when_it_loads(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert codes(train(1, run, {"run.steps": 4, **EVERY})) == {0}
    back = {"run.resume": str(run / "checkpoints" / "step-00000002"), "run.steps": 6, **EVERY}
    harm(run / "checkpoints" / "step-00000002", 0xFF)
    assert codes(train(1, run, back)) == {2}
    assert "step-00000004" in checkpoints(run)
    harm(run / "checkpoints" / "step-00000002", 0xFF)  # mended
    assert codes(train(1, run, back)) == {0}
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert sum(name.startswith("step-00000004.set-aside") for name in checkpoints(run)) == 1


def test_a_folder_in_use_by_another_process_is_refused_and_names_it(tmp_path: Path) -> None:
    program = (
        "import sys; from ultrascale.observe.run_folder import RunFolder\n"
        f"folder = RunFolder({str(tmp_path / 'run')!r}, config={{}}); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"is in use by process {holder.pid} on"):
            RunFolder(tmp_path / "run", config={})
        holder.communicate("")
    RunFolder(tmp_path / "run", config={})


def test_weights_that_are_not_finite_are_not_saved_over_healthy_ones(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings: dict[str, Any] = {"checkpoint.every": 1, "optimizer.weight_decay": 1e300, "run.steps": 1}
    (outcome,) = train(1, run, settings)
    assert outcome.code == 1
    assert status(run)["state"] == "failed"
    assert re.search(r"embed_tokens\.weight.* not finite", status(run)["reason"])
    assert checkpoints(run) == []


def test_validation_is_plain_cross_entropy_whatever_training_is_smoothed_by(tmp_path: Path) -> None:
    def first(smoothing: float) -> dict[str, float]:
        run = tmp_path / str(smoothing)
        settings = {"evaluation.every": 1, "run.steps": 1, "optimizer.lr": 1e-30, "model.label_smoothing": smoothing}
        assert codes(train(1, run, settings)) == {0}
        return metrics(run)[0]

    plain, smoothed = first(0.0), first(0.5)
    assert smoothed["lm_loss"] != pytest.approx(plain["lm_loss"], rel=1e-6)
    assert smoothed["validation_loss"] == pytest.approx(plain["validation_loss"], rel=1e-6)


def test_one_process_rounds_no_gradient_to_the_dtype_of_travel(tmp_path: Path) -> None:
    norms = []
    for reduce in ("float32", "bfloat16"):
        run = tmp_path / reduce
        assert codes(train(1, run, {"run.steps": 1, "precision.reduce": reduce})) == {0}
        norms.append(metrics(run)[0]["grad_norm"])
    assert norms[0] == norms[1]


def test_a_run_gives_the_signals_back(tmp_path: Path) -> None:
    """A handler that stays keeps the run's groups, and their threads, alive into the end of the process."""
    program = f"""
import os, signal
from ultrascale import train
before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
code = train.main(["--config", "configs/debug.yaml", "--device", "cpu", "run.steps=1", "data.train=builtin:uneven",
                   "data.validation=null", "run.dir={tmp_path / "run"}"])
assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
raise SystemExit(code)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, check=False).returncode == 0


def test_terms_are_added_in_the_family_s_order() -> None:
    objective = Objective({name: Term("targets", 1.0) for name in ("lm", "z", "a", "b")})
    sums = {"lm": torch.tensor(1e8), "b": torch.tensor(1.0), "a": torch.tensor(1.0), "z": torch.tensor(-1e8)}
    expected = ((sums["lm"] + sums["z"]) + sums["a"]) + sums["b"]
    assert expected == 2.0  # in float32 another order loses the small ones
    assert torch.equal(objective.scalar(sums, {"targets": 1}), expected)
