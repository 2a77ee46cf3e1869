"""configs/debug_moe.yaml as it is: it starts, and the layout of its experts changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_cases import codes, metrics, train

from ultrascale.config.load import load
from ultrascale.config.schema import flatten

CONFIG = Path(__file__).parents[2] / "configs" / "debug_moe.yaml"


def settings(**parallel: int) -> dict[str, Any]:
    """Every key of the file, for two steps."""
    keys = flatten(load(CONFIG).config)
    own = {"run.steps": 2, "checkpoint.every": 0, "checkpoint.keep": None}
    return {**keys, **own, **{f"parallel.{axis}": size for axis, size in parallel.items()}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    assert codes(train(1, folder, settings() | {"run.dir": str(folder)})) == {0}
    return metrics(folder)


@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2}], ids=str)
def test_the_debug_mixture_starts_and_learns_the_same_under_every_layout(
    alone: list[dict[str, Any]], tmp_path: Path, layout: dict[str, int]
) -> None:
    assert codes(train(2, tmp_path, settings(**layout) | {"run.dir": str(tmp_path)})) == {0}
    found = metrics(tmp_path)
    assert len(found) == len(alone) == 2
    for line, expected in zip(found, alone, strict=True):
        for name in ("loss", "lm_loss", "aux_balance", "grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4), name
    assert alone[1]["loss"] < alone[0]["loss"]
    assert alone[0]["loss"] > alone[0]["lm_loss"]
