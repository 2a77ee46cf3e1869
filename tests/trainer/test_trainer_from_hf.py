"""A run that starts from a Hugging Face folder: its weights, then training as ever, under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import checkpoints, codes, lines, metrics, status, train

from ultrascale import cli

# One step that changes nothing: what is exported afterwards are the weights of the first loss.
STILL = {"optimizer.lr": 0.0, "run.steps": 1, "checkpoint.every": 1}
# Other first weights, were they drawn; and so large that the notice about the first loss would be due.
STARTED = {"model.initializer_range": 3.0, "run.steps": 2, "checkpoint.every": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2": (2, {"parallel.tp": 2}),
    "pp2": (2, {"parallel.pp": 2}),
    "dp2 zero 3": (2, {"parallel.dp": 2, "parallel.zero_stage": 3}),
}


def convert(*words: Any) -> None:
    assert cli.main(["convert", *map(str, words)]) == 0


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, and beside it the run that it was exported from."""
    root = tmp_path_factory.mktemp("exported")
    assert codes(train(1, root / "run", STILL)) == {0}
    convert("to-hf", root / "run", root / "hf")
    return root / "hf"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_loss_is_that_of_the_folders_weights_under_any_layout(
    exported: Path, tmp_path: Path, layout: str
) -> None:
    world, overrides = LAYOUTS[layout]
    settings = {**STARTED, **overrides, "init.from_hf": str(exported)}
    assert codes(train(world, tmp_path / "run", settings)) == {0}
    (expected,) = (line["loss"] for line in metrics(exported.parent / "run"))
    first, second = (line["loss"] for line in metrics(tmp_path / "run"))
    assert first == pytest.approx(expected, rel=1e-6)
    assert second != pytest.approx(first, rel=1e-6)
    events = lines(tmp_path / "run" / "events.jsonl")
    assert [e["path"] for e in events if e["event"] == "first_weights"] == [str(exported)]
    assert not [e for e in events if e["event"] == "first_loss"]


MIXTURE = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "model.router_aux_loss_coef": 0.01}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"model.sliding_window": 5, "parallel.tp": 2},
    "qwen3": {"model.family": "qwen3", "parallel.pp": 2},
    "mixtral": {**MIXTURE, "model.family": "mixtral", "model.moe_intermediate_size": 24, "parallel.ep": 2},
    "qwen3_moe": {
        **MIXTURE,
        "model.family": "qwen3_moe",
        "model.moe_intermediate_size": 12,
        "model.mlp_only_layers": (0,),
        "parallel.tp": 2,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_out_and_starts_from_there_under_another_layout(tmp_path: Path, family: str) -> None:
    alone = {key: value for key, value in FAMILIES[family].items() if not key.startswith("parallel.")}
    assert codes(train(1, tmp_path / "run", {**STILL, **alone})) == {0}
    convert("to-hf", tmp_path / "run", tmp_path / "hf")
    settings = {**STARTED, **FAMILIES[family], "init.from_hf": str(tmp_path / "hf"), "run.steps": 1}
    assert codes(train(2, tmp_path / "started", settings)) == {0}
    (expected,), (first,) = metrics(tmp_path / "run"), metrics(tmp_path / "started")
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_a_run_that_goes_on_does_not_look_at_the_folder_again(exported: Path, tmp_path: Path) -> None:
    settings = {**STARTED, "init.from_hf": str(exported)}
    train(1, tmp_path / "whole", {**settings, "run.steps": 4})
    train(1, tmp_path / "parts", settings)
    assert codes(train(1, tmp_path / "parts", {**settings, "init.from_hf": "gone", "run.steps": 4})) == {0}
    assert [line["loss"] for line in metrics(tmp_path / "whole")] == [
        line["loss"] for line in metrics(tmp_path / "parts")
    ]


def test_a_folder_of_another_model_stops_every_rank_with_the_same_words(exported: Path, tmp_path: Path) -> None:
    settings = {**STARTED, "parallel.tp": 2, "init.from_hf": str(exported), "model.num_hidden_layers": 3}
    assert codes(train(2, tmp_path / "run", settings)) == {2}
    assert "layers.2." in status(tmp_path / "run")["reason"]
    assert not checkpoints(tmp_path / "run")


def test_the_end_of_such_a_run_goes_out_again_with_the_files_that_came_with_it(exported: Path, tmp_path: Path) -> None:
    (exported / "special_tokens_map.json").write_text("{}")
    train(1, tmp_path / "run", {**STARTED, "init.from_hf": str(exported)})
    convert("to-hf", tmp_path / "run", tmp_path / "out", "--dtype", "bfloat16")
    assert (tmp_path / "out" / "special_tokens_map.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
