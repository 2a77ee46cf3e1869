"""A checkpoint that was cut for another layout is gone on from as if nothing had been: the same steps follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_cases import codes, metrics, train

from ultrascale import cli

SETTINGS = {"precision.compute": "float64", "run.steps": 5, "checkpoint.every": 2, "checkpoint.keep": None}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"parallel.tp": 2}),
    "pp2": (2, {"parallel.pp": 2}),
    "dp2 zero1": (2, {"parallel.dp": 2, "parallel.zero_stage": 1}),
    "tp2 dp2 zero3": (4, {"parallel.tp": 2, "parallel.dp": 2, "parallel.zero_stage": 3}),
}
FLAGS = {"parallel.tp": "--tp", "parallel.pp": "--pp", "parallel.dp": "--dp", "parallel.zero_stage": "--zero-stage"}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    assert codes(train(1, folder / "run", SETTINGS)) == {0}
    return folder / "run"


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_steps_after_a_reshard_are_those_of_the_unbroken_run(unbroken: Path, tmp_path: Path, name: str) -> None:
    world, layout = LAYOUTS[name]
    flags = [word for key, value in layout.items() for word in (FLAGS[key], str(value))]
    source, cut = str(unbroken / "checkpoints" / "step-00000002"), tmp_path / "cut"
    assert cli.main(["checkpoint", "reshard", source, str(cut), *flags]) == 0
    assert codes(train(world, tmp_path / "run", {**SETTINGS, **layout, "run.resume": str(cut)})) == {0}
    expected, found = metrics(unbroken)[2:], metrics(tmp_path / "run")
    assert [line["step"] for line in found] == [3, 4, 5]
    for one, other in zip(expected, found, strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens"):
            assert other[key] == pytest.approx(one[key], rel=1e-9, abs=0), (one["step"], key)
    # And back again: what it saved at the end is the unbroken run's state, moments too.
    words = ["diff", str(unbroken), str(tmp_path / "run"), "--tolerance", "1e-9"]
    assert cli.main(["checkpoint", *words]) == 0
