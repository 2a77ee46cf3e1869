"""First weights from a checkpoint: what a rule leaves fresh is what the seed draws, bit for bit under every layout."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_cases import header
from hf_side import start

from pool import pool
from small import Box, assembled, boxes, config_of, whole
from ultrascale.checkpoint import check
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.convert import to_hf
from ultrascale.checkpoint.folder import folder_name
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.workers import Workers
from ultrascale.checkpoint.write import save
from ultrascale.config.schema import Config, Init, WeightRule

SOURCE: dict[str, Any] = {"run.seed": 11, "optimizer.name": "adamw", "precision.compute": "float32"}
LARGER = {
    **SOURCE,
    "run.seed": 5,
    "model.num_hidden_layers": 5,
    "model.vocab_size": 150,
    "precision.compute": "float64",
    "batch.global_size": 8,
}
RULES = (
    WeightRule(match="lm_head.*", action="fresh"),
    WeightRule(match="embed_tokens.weight", action="rows"),
    WeightRule(match="layers.2-3.*", action="copy", source="layers.0-1.*"),
    WeightRule(match="layers.4.*", action="fresh"),
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp=2": (2, {"parallel.tp": 2}),
    "pp=2, dp=2, zero 3": (4, {"parallel.pp": 2, "parallel.dp": 2, "parallel.zero_stage": 3}),
    "dp=2, zero 1": (2, {"parallel.dp": 2, "parallel.zero_stage": 1}),
}
Weights = dict[str, np.ndarray]


def weights_of(assembly: Any) -> Weights:
    return whole([boxes(assembly, "masters")])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose moments are not those of a new run."""
    config = config_of(SOURCE)
    assembly = assembled(config)
    owned = list(state_boxes(assembly.optimizer, owned=True))
    for box in owned:
        if "/" in box.name:
            box.tensor.fill_(3.0)
    folder = tmp_path_factory.mktemp("source") / folder_name(7)
    save(folder, owned, {**header(7), "config": config.model_dump(mode="json")})
    return folder


@cache
def expected() -> Weights:
    """By hand from what the two seeds draw on one process."""
    there, here = weights_of(assembled(config_of(SOURCE))), weights_of(assembled(config_of(LARGER)))
    for name in here:
        if name.startswith(("layers.2.", "layers.3.")):
            here[name] = there[name.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1.")]
        elif name in there and not name.startswith(("lm_head", "embed", "layers.4")):
            here[name] = there[name]
    here["embed_tokens.weight"][:131] = there["embed_tokens.weight"]
    return here


def started(config: Config, world: int, init: Init) -> tuple[Weights, list[dict[str, Any]]]:
    ranks = [start(None, config, init)] if world == 1 else pool(world).run(start, config, init)
    held: list[list[Box]] = [rank["weights"] for rank in ranks]
    return whole(held), ranks


def same(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rules_give_the_same_first_weights_under_every_layout(source: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    found, ranks = started(
        config_of({**LARGER, **overrides}, world), world, Init(from_checkpoint=str(source), rules=RULES)
    )
    same(found, expected())
    # Weights only: moments are those of a new run.
    assert {value for rank in ranks for value in rank["moments"]} == {0.0}


@pytest.mark.parametrize("layout", ["one process", "tp=2"])
def test_a_hugging_face_folder_takes_the_same_rules(source: Path, tmp_path: Path, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    with Workers(1, 16 << 20) as workers:
        to_hf(source, tmp_path / "hf", workers)
    config = config_of({**LARGER, **overrides}, world)
    same(started(config, world, Init(from_hf=str(tmp_path / "hf"), rules=RULES))[0], expected())


def test_without_rules_all_weights_are_those_of_the_source(source: Path) -> None:
    found, _ = started(config_of({**SOURCE, "run.seed": 1}), 1, Init(from_checkpoint=str(source)))
    same(found, weights_of(assembled(config_of(SOURCE))))


def test_an_untied_head_may_begin_as_the_embedding(tmp_path: Path) -> None:
    tied = config_of({**SOURCE, "model.tie_word_embeddings": True})
    assembly = assembled(tied)
    saved = {**header(7), "config": tied.model_dump(mode="json")}
    save(tmp_path / folder_name(7), list(state_boxes(assembly.optimizer, owned=True)), saved)
    rules = (WeightRule(match="lm_head.weight", action="copy", source="embed_tokens.weight"),)
    found, _ = started(config_of(SOURCE), 1, Init(from_checkpoint=str(tmp_path / folder_name(7)), rules=rules))
    np.testing.assert_array_equal(found["lm_head.weight"], weights_of(assembly)["embed_tokens.weight"])


def test_what_does_not_fit_is_refused_by_every_rank_in_the_same_words(source: Path) -> None:
    config = config_of({**SOURCE, "parallel.pp": 2, "model.num_hidden_layers": 3}, 2)
    with pytest.raises(Exception, match=r"layers\.2\.mlp\.up_proj\.weight is missing there; {match: ") as raised:
        pool(2).run(start, config, Init(from_checkpoint=str(source)))
    assert "action: fresh} draws it from run.seed" in str(raised.value)
    narrow = config_of({**SOURCE, "precision.compute": "float32"})
    wide = config_of({**SOURCE, "precision.compute": "float64"})
    folder = source.parent / folder_name(9)
    saved = {**header(9), "config": wide.model_dump(mode="json")}
    save(folder, list(state_boxes(assembled(wide).optimizer, owned=True)), saved)
    with pytest.raises(CheckpointError, match="is float64 there and masters are float32 here"):
        start(None, narrow, Init(from_checkpoint=str(folder)))


def test_damage_is_found_by_full_verification_in_what_is_read_alone(source: Path, tmp_path: Path) -> None:
    damaged = tmp_path / folder_name(7)
    damaged.mkdir()
    for path in source.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    file = damaged / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    place = data.index(torch.full((4,), 3.0).numpy().tobytes())
    data[place] ^= 1
    file.write_bytes(data)
    # A moment: weights are whole.
    start(None, config_of(SOURCE), Init(from_checkpoint=str(damaged)))
    row = weights_of(assembled(config_of(SOURCE)))["lm_head.weight"][130].astype(np.float32)
    data[data.index(row.tobytes())] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checksum of tensor lm_head\.weight"):
        start(None, config_of(SOURCE), Init(from_checkpoint=str(damaged)))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such folder": ({"init.from_checkpoint": "nowhere"}, "nowhere is neither a run folder nor a checkpoint"),
    "another base": ({"model.rope_theta": 5.0}, r"model\.rope_theta=5\.0 is 10000\.0 there.*name it in checkpoint"),
    "more layers": ({"model.num_hidden_layers": 3}, r"num_hidden_layers=3 is 2 there.*say with init\.rules which"),
    "other heads, with rules": ({"model.num_attention_heads": 2, "init.rules": RULES}, r"num_attention_heads=2 is 4"),
    "another tokenizer": ({"data.tokenizer": "other.json"}, r"tokens of data\.tokenizer=bytes, this run has other"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_or_tokenizer_is_refused_before_the_run_starts(source: Path, tmp_path: Path, case: str) -> None:
    changes, named = REFUSED[case]
    given = {**SOURCE, "init.from_checkpoint": str(source), "run.dir": str(tmp_path / "run")}
    assert check.check_files(config_of(given)) == []
    (problem,) = check.check_files(config_of({**given, **changes}))
    assert problem.key == "init.from_checkpoint"
    assert re.search(named, problem.message)


def test_leave_by_name_and_rules_let_a_model_differ(source: Path, tmp_path: Path) -> None:
    given = {**SOURCE, "init.from_checkpoint": str(source), "run.dir": str(tmp_path / "run")}
    for changes in (
        {"model.rope_theta": 5.0, "checkpoint.allow_changes": ("model.rope_theta",)},
        {"data.tokenizer": "other.json", "checkpoint.allow_changes": ("data.tokenizer",)},
        {"model.num_hidden_layers": 5, "model.vocab_size": 150, "init.rules": RULES},
    ):
        assert check.check_files(config_of({**given, **changes})) == []
