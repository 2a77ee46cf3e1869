"""What a model writes is a function of weights, prompt and seed; the layout that trained it plays no part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_bad_input import tokens
from trainer_cases import codes, tensors, train

from ultrascale import cli

SETTINGS: dict[str, Any] = {
    "model.vocab_size": 257,  # of the tokenizer `bytes`
    "precision.compute": "float64",
    "run.steps": 12,
    "checkpoint.every": 6,
    "optimizer.lr": 0.02,
    "data.validation": None,
}
TEXT = b"to be or not to be, "
# Two characters always tell the next one, so that little training is enough.
PHRASE = b"jumping fox dwelt, "


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same training on one process and under tp2·pp2."""
    folder = tmp_path_factory.mktemp("generation")
    corpus = tokens(folder / "corpus", list(TEXT * 40))
    settings = {**SETTINGS, "data.train": corpus}
    assert codes(train(1, folder / "one", settings)) == {0}
    cut = {"parallel.tp": 2, "parallel.pp": 2, "pipeline.layout": (2, 0)}
    assert codes(train(4, folder / "cut", {**settings, **cut})) == {0}
    return {"one": folder / "one", "cut": folder / "cut"}


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def generated(path: Path, *options: str, prompt: str = "to be") -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main(["generate", str(path), "--prompt", prompt, "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    return generated


def test_greedy_text_is_the_same_from_a_checkpoint_of_any_layout(
    runs: dict[str, Path], generate: Callable[..., dict[str, Any]]
) -> None:
    one, cut = (generate(runs[name], "--temperature", "0", "--tokens", "30") for name in ("one", "cut"))
    assert one["tokens"] == cut["tokens"]
    assert len(one["tokens"]) == 30
    assert one["checkpoint"].endswith("one/checkpoints/step-00000012")
    # The checkpoints are cut differently, and an earlier one writes something else: it is the weights that count.
    files = {name: len(list(Path(text["checkpoint"]).iterdir())) for name, text in (("one", one), ("cut", cut))}
    assert files["one"] < files["cut"]
    earlier = generate(runs["cut"] / "checkpoints" / "step-00000006", "--temperature", "0", "--tokens", "30")
    assert earlier["tokens"] != cut["tokens"]


def test_sampled_text_depends_on_the_seed_alone(runs: dict[str, Path], generate: Callable[..., dict[str, Any]]) -> None:
    def sampled(name: str, seed: int, *options: str) -> list[int]:
        torch.manual_seed(len(options))  # the process's own stream plays no part
        return generate(runs[name], "--temperature", "1.5", "--seed", str(seed), *options)["tokens"]

    first = sampled("one", 1, "--tokens", "30")
    assert first == sampled("one", 1, "--tokens", "30") == sampled("cut", 1, "--tokens", "30")
    assert first != sampled("one", 2, "--tokens", "30")
    # Drawing less of it is a prefix.
    assert sampled("one", 1, "--tokens", "10") == first[:10]
    # Among one candidate there is no choice: greedy.
    greedy = generate(runs["one"], "--temperature", "0", "--tokens", "12")["tokens"]
    assert sampled("one", 1, "--tokens", "12", "--top-k", "1") == greedy
    assert set(sampled("one", 1, "--tokens", "30", "--top-k", "2")) != set(first)


def test_a_model_that_learned_a_text_goes_on_with_it(tmp_path: Path, generate: Callable[..., dict[str, Any]]) -> None:
    settings = {
        **SETTINGS,
        "precision.compute": "float32",
        "data.train": tokens(tmp_path / "corpus", list(PHRASE * 60)),
        # Decayed to nothing: what was learned must not hang on the rounding of one step.
        "run.steps": 120,
        "optimizer.lr": 0.01,
        "schedule.name": "cosine",
        "schedule.total_steps": 120,
        "checkpoint.every": 1000,
        "batch.sequence_length": 16,
        "model.max_position_embeddings": 16,
        "model.hidden_size": 32,
        "model.intermediate_size": 64,
    }
    assert codes(train(1, tmp_path / "run", settings)) == {0}
    # 50 tokens are more than its context: the window moves on.
    found = generate(tmp_path / "run", "--temperature", "0", "--tokens", "50", prompt="jumping")
    assert found["text"] == (PHRASE * 4).decode()[len("jumping") :][:50]


def test_what_holds_no_checkpoint_is_refused_by_name(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hollow" / "checkpoints").mkdir(parents=True)
    for path, words in (
        (tmp_path / "nowhere", "neither a run folder nor a checkpoint"),
        (tmp_path / "hollow", "holds no whole checkpoint"),
        (runs["one"] / "checkpoints", "neither a run folder nor a checkpoint"),
    ):
        assert cli.main(["generate", str(path)]) == 2
        said = capsys.readouterr().err
        assert str(path) in said
        assert words in said


def test_the_two_layouts_saved_the_same_weights(runs: dict[str, Path]) -> None:
    one, cut = (tensors(runs[name] / "checkpoints" / "step-00000012") for name in ("one", "cut"))
    assert one.keys() == cut.keys()
    assert all(abs(one[name] - cut[name]).max() < 1e-8 for name in one)
