"""A run that starts from a Hugging Face folder: its weights, then training as ever, under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import checkpoints, codes, config_of, lines, metrics, status, train

from ultrascale import cli
from ultrascale.checkpoint import check

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


MIXTURE = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "model.router_aux_loss_coef": 0.01,
           "model.router_aux_loss_scope": "global_batch"}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"model.sliding_window": 5, "parallel.tp": 2},
    "qwen3": {"model.family": "qwen3", "parallel.pp": 2},
    "mixtral": {**MIXTURE, "model.family": "mixtral", "model.moe_intermediate_size": 24, "parallel.ep": 2},
    "deepseek_v3": {
        **MIXTURE,
        "model.family": "deepseek_v3",
        "model.num_key_value_heads": None,
        "model.kv_lora_rank": 8,
        "model.qk_nope_head_dim": 4,
        "model.qk_rope_head_dim": 4,
        "model.v_head_dim": 4,
        "model.moe_intermediate_size": 12,
        "model.n_shared_experts": 1,
        "model.first_k_dense_replace": 1,
        "model.scoring_func": "sigmoid",
        "model.router_bias_update_rate": 0.0,
        "parallel.tp": 2,
    },
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


def same_folder(a: Path, b: Path) -> None:
    assert sorted(path.name for path in a.iterdir()) == sorted(path.name for path in b.iterdir())
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes(), path.name


def test_the_end_of_a_run_goes_out_by_itself_as_convert_writes_it(tmp_path: Path) -> None:
    settings = {"run.steps": 2, "checkpoint.every": 1, "checkpoint.export_hf": "hugging_face", "parallel.tp": 2}
    assert codes(train(2, tmp_path / "run", settings)) == {0}
    convert("to-hf", tmp_path / "run", tmp_path / "by_hand")
    first = tmp_path / "run" / "hugging_face" / "step-00000002"
    same_folder(first, tmp_path / "by_hand")
    (event,) = [e for e in lines(tmp_path / "run" / "events.jsonl") if e["event"] == "export"]
    assert (event["step"], event["path"]) == (2, str(first))
    # A run that is finished leaves it alone, one that goes on writes another, one that is stopped none.
    before = first.stat().st_mtime_ns
    assert codes(train(2, tmp_path / "run", settings)) == {0}
    assert first.stat().st_mtime_ns == before
    assert codes(train(2, tmp_path / "run", {**settings, "run.steps": 3})) == {0}
    assert sorted(path.name for path in first.parent.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.family": "outside.model:Mine"}, "model.family=outside.model:Mine has no mapping"),
        ({"checkpoint.every": 0}, "checkpoint.every=0 saves none; set checkpoint.every"),
        ({"checkpoint.export_hf": "/tmp/out"}, "is no folder of its own in the run folder; use hugging_face"),
        ({"checkpoint.export_hf": "a/../../out"}, "is no folder of its own"),
        ({"checkpoint.export_hf": "checkpoints"}, "is no folder of its own"),
    ],
)
def test_an_export_that_cannot_be_is_refused_before_the_run(changes: dict[str, Any], named: str) -> None:
    good = {"checkpoint.every": 1, "checkpoint.export_hf": "hugging_face"}
    assert check.check(config_of(good)) == []
    (problem,) = (p for p in check.check(config_of({**good, **changes})) if p.key == "checkpoint.export_hf")
    assert named in problem.message


def test_an_export_that_fails_fails_on_every_rank_with_its_reason(tmp_path: Path) -> None:
    settings = {"run.steps": 1, "checkpoint.every": 1, "checkpoint.export_hf": "taken", "parallel.tp": 2}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "taken").write_text("a file")
    outcomes = train(2, tmp_path / "run", settings)
    assert codes(outcomes) == {1}
    assert "taken" in status(tmp_path / "run")["reason"]
    assert len(checkpoints(tmp_path / "run")) == 1


RULES = (
    {"match": "lm_head.weight", "action": "fresh"},
    {"match": "layers.2.*", "action": "copy", "source": "layers.1.*"},
)


def test_a_run_may_begin_with_the_weights_of_another_and_say_what_differs(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = exported.parent / "run"
    same = {**STARTED, "init.from_checkpoint": str(source), "parallel.dp": 2, "parallel.zero_stage": 3}
    assert codes(train(2, tmp_path / "same", same)) == {0}
    (expected,) = (line["loss"] for line in metrics(source))
    first, _ = metrics(tmp_path / "same")
    assert (first["step"], first["loss"]) == (1, pytest.approx(expected, rel=1e-6))
    (event,) = [e for e in lines(tmp_path / "same" / "events.jsonl") if e["event"] == "first_weights"]
    assert Path(event["path"]).name == checkpoints(source)[-1]
    larger = {
        **STARTED,
        "init.from_checkpoint": str(source),
        "init.rules": RULES,
        "model.num_hidden_layers": 3,
        "model.tie_word_embeddings": False,
    }
    capsys.readouterr()
    assert codes(train(1, tmp_path / "larger", larger)) == {0}
    (event,) = [e for e in lines(tmp_path / "larger" / "events.jsonl") if e["event"] == "first_weights"]
    assert [(rule["rule"], len(rule["tensors"])) for rule in event["rules"]] == [
        ("{match: lm_head.weight, action: fresh}", 1),
        ("{match: layers.2.*, action: copy, source: layers.1.*}", 9),
    ]
    said = capsys.readouterr().out
    assert "first weights by {match: lm_head.weight, action: fresh}: 1 tensors (lm_head.weight)" in said
    # It goes on without its source, as a run with weights of its own.
    assert codes(train(1, tmp_path / "larger", {**larger, "init.from_checkpoint": "gone", "run.steps": 3})) == {0}
