"""A run goes on under another meaning only where each changed key is named: a longer context, another base (K5)."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_trainer_bad_input import tokens
from trainer_cases import checkpoints, lines, metrics, numbers, tensors, train, yaml_file

from ultrascale.config import meaning
from ultrascale.config.collect import check
from ultrascale.config.load import load
from ultrascale.config.problem import ConfigError
from ultrascale.description import tokens_so_far

SHORT = {"batch.sequence_length": 32, "model.max_position_embeddings": 32, "checkpoint.every": 4, "run.steps": 4}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LONG = {
    **SHORT, "batch.sequence_length": 64, "model.max_position_embeddings": 64, "model.rope_scaling": YARN,
    "run.steps": 6, "schedule.warmup_steps": 0,
}  # fmt: skip
CHANGED = ("batch.sequence_length", "model.max_position_embeddings", "model.rope_scaling")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps at length 32; no test writes into it."""
    folder = tmp_path_factory.mktemp("short") / "run"
    train(1, folder, SHORT)
    return folder


def allowing(*keys: str) -> dict[str, Any]:
    return {"checkpoint.allow_changes": keys}


def refusal(folder: Path, overrides: dict[str, Any]) -> str:
    """What is said of a run that is refused."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        (outcome,) = train(1, folder, overrides)
    assert outcome.code == 2
    return said.getvalue()


def notices(folder: Path) -> list[list[str]]:
    return [line["changes"] for line in lines(folder / "events.jsonl") if line["event"] == "allowed_changes"]


def test_a_run_goes_on_at_twice_the_length_from_the_very_bits_that_were_saved(short: Path, tmp_path: Path) -> None:
    settings = {**LONG, "run.resume": str(short), **allowing(*CHANGED)}
    (at_start,) = train(1, tmp_path / "start", {**settings, "run.steps": 4})
    saved = tensors(short / "checkpoints" / "step-00000004")
    assert at_start.samples == {}
    assert {name: data for name, (_, data) in at_start.state.items()} == {
        name: values.astype(np.float32).tobytes() for name, values in saved.items()
    }
    assert {name.split("/")[0] for name in saved if "/" in name} == {"optimizer.exp_avg", "optimizer.exp_avg_sq"}

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        (outcome,) = train(1, tmp_path / "long", settings)
    assert outcome.code == 0
    found = metrics(tmp_path / "long")
    assert [line["step"] for line in found] == [5, 6]
    assert all(math.isfinite(line["loss"]) and line["lr"] == 0.01 for line in found)
    # Sequences go on by number: 4 a step, whatever they are long.
    assert outcome.samples == {5: [16, 17, 18, 19], 6: [20, 21, 22, 23]}
    assert [line["tokens"] for line in found] == [4 * 4 * 32 + n * 4 * 64 for n in (1, 2)]
    ((*changes, order),) = notices(tmp_path / "long")
    assert changes == [
        "model.max_position_embeddings was 32 and is 64",
        f"model.rope_scaling was None and is {tree(YARN)}",
        "batch.sequence_length was 32 and is 64",
    ]
    assert "samples go on at number 16 of another order" in order
    assert f"notice: from step 5 on by checkpoint.allow_changes: {'; '.join([*changes, order])}" in said.getvalue()
    assert f"{4 * 4 * 32 + 2 * 4 * 64:,} tokens in all" in said.getvalue()

    # From here on this is what the run is: no permission is needed, and one that is still there does no harm.
    for steps, allowed in ((7, ()), (8, CHANGED)):
        (outcome,) = train(1, tmp_path / "long", {**LONG, "run.steps": steps, **allowing(*allowed)})
        assert outcome.code == 0
    assert [line["tokens"] for line in metrics(tmp_path / "long")] == [512 + n * 256 for n in (1, 2, 3, 4)]
    assert len(notices(tmp_path / "long")) == 1


def tree(scaling: dict[str, Any]) -> dict[str, Any]:
    optional = dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"))
    return {**scaling, "beta_fast": 32.0, "beta_slow": 1.0, **optional, "truncate": True}


def test_the_same_folder_goes_on_too_and_keeps_both_parts(tmp_path: Path) -> None:
    train(1, tmp_path / "run", SHORT)
    saved = tensors(tmp_path / "run" / "checkpoints" / "step-00000004")
    said = refusal(tmp_path / "run", LONG)
    assert "holds a different run" in said
    assert "checkpoint.allow_changes=[model.max_position_embeddings,model.rope_scaling,batch.sequence_length]" in said
    before = numbers(tmp_path / "run")
    (outcome,) = train(1, tmp_path / "run", {**LONG, **allowing(*CHANGED)})
    assert outcome.code == 0
    assert numbers(tmp_path / "run")[:4] == before
    assert [line["tokens"] for line in metrics(tmp_path / "run")] == [128, 256, 384, 512, 768, 1024]
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]
    now = tensors(tmp_path / "run" / "checkpoints" / "step-00000006")
    assert now.keys() == saved.keys()
    assert all((now[name] != values).any() for name, values in saved.items())
    assert "holds a different run" in refusal(tmp_path / "run", {**SHORT, "run.steps": 8})


@pytest.mark.parametrize("missing", CHANGED)
def test_a_change_that_is_not_named_is_refused_with_both_values_and_the_way_out(
    missing: str, short: Path, tmp_path: Path
) -> None:
    named = [key for key in CHANGED if key != missing]
    said = refusal(tmp_path / "long", {**LONG, "run.resume": str(short), **allowing(*named)})
    clause = {
        "batch.sequence_length": "batch.sequence_length was 32 and is 64",
        "model.max_position_embeddings": "model.max_position_embeddings was 32 and is 64",
        "model.rope_scaling": "model.rope_scaling was None and is {'rope_type': 'yarn', 'factor': 2.0,",
    }[missing]
    assert f"cannot be gone on from: {clause}" in said
    assert f"add checkpoint.allow_changes=[{','.join([*named, missing])}]" in said
    assert not any(f"{key} was" in said for key in named)


def test_a_permission_that_nothing_needs_changes_nothing(short: Path, tmp_path: Path) -> None:
    settings = {**SHORT, "run.resume": str(short), "run.steps": 6}
    (plain,) = train(1, tmp_path / "plain", settings)
    (allowed,) = train(1, tmp_path / "allowed", {**settings, **allowing("model.rope_theta", "optimizer.lr")})
    assert plain.state == allowed.state
    assert notices(tmp_path / "allowed") == []


def test_other_data_are_named_by_data_train(short: Path, tmp_path: Path) -> None:
    corpus = tokens(tmp_path / "corpus", [n % 131 for n in range(1000)])
    settings = {**SHORT, "run.resume": str(short), "run.steps": 5, "data.train": corpus, "data.validation": None}
    said = refusal(tmp_path / "new", settings)
    assert "the data are not the same tokens" in said
    assert "add checkpoint.allow_changes=[data.train]" in said
    (outcome,) = train(1, tmp_path / "new", {**settings, **allowing("data.train")})
    assert outcome.code == 0
    ((content, order),) = notices(tmp_path / "new")
    assert "not the same tokens" in content
    assert "another order" in order


def test_what_decides_the_tensors_is_not_offered(short: Path, tmp_path: Path) -> None:
    said = refusal(tmp_path / "new", {**SHORT, "run.resume": str(short), "model.intermediate_size": 32})
    assert "model.intermediate_size was 24 and is 32; set these back, or start a new run" in said
    assert "allow_changes" not in said


def test_of_two_scalings_only_what_differs_is_said() -> None:
    before, now = ({"model": {"rope_scaling": {**tree(YARN), "factor": factor}}} for factor in (2.0, 4.0))
    (change,) = meaning.differences(before, now)
    assert change.text == "model.rope_scaling.factor was 2.0 and is 4.0"
    assert meaning.refused([change], {"checkpoint": {"allow_changes": ["model.rope_theta"]}}) == [change]
    assert meaning.refused([change], {"checkpoint": {"allow_changes": ["model.rope_scaling"]}}) == []


def test_every_key_of_meaning_can_be_named_or_decides_the_tensors() -> None:
    config = load(Path(__file__).parents[2] / "configs" / "debug.yaml").config.model_dump(mode="json")
    keys = {change.keys[0] for change in meaning.differences({}, config)}
    assert keys == {key for key in (*meaning.nameable(), *meaning.SHAPES) if not key.startswith("data.")}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.rope_scalin", "model.rope_scalin is not a key of a config; did you mean model.rope_scaling?"),
        ("sequence_length", "sequence_length is not a key of a config; did you mean batch.sequence_length?"),
        ("lr", "lr is not a key of a config; did you mean optimizer.lr?"),
        ("x", "x is not a key of a config; write section and key, as model.rope_scaling"),
        ("model.rope_scaling.factor", "is a part of model.rope_scaling; write model.rope_scaling"),
        ("model.num_experts", "decides which tensors there are, and those of the checkpoint must fit; leave it out"),
        ("model.hidden_size", "decides which tensors there are, and those of the checkpoint must fit; leave it out"),
        ("parallel.tp", "parallel.tp may change without leave; leave it out"),
        ("optimizer.offload", "optimizer.offload may change without leave; leave it out"),
    ],
)
def test_a_name_that_permits_nothing_is_refused_with_the_nearest(name: str, sentence: str, tmp_path: Path) -> None:
    loaded = load(yaml_file(tmp_path / "run.yaml"), [f"checkpoint.allow_changes=[{name}]"])
    with pytest.raises(ConfigError) as error:
        check(loaded, 1)
    assert sentence in str(error.value)


def test_a_checkpoint_that_does_not_say_its_tokens_had_one_length_throughout(short: Path) -> None:
    header = json.loads((short / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert tokens_so_far(header) == header["data_position"].pop("tokens") == 512
    assert tokens_so_far(header) == 512
