"""Runs on packed and masked documents: they stop and go on as any other, and refuse what would make them another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_cases import codes, numbers, train

from ultrascale.data.writer import IndexedWriter

PACKED: dict[str, Any] = {"data.packing": "best_fit", "data.document_mask": True, "data.reset_positions": True}
MASKED: dict[str, Any] = {"data.document_mask": True}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "cache"))


def corpus(path: Path, longest: int = 8, seed: int = 1) -> str:
    random = np.random.default_rng(seed)
    with IndexedWriter(path, 131) as writer:
        for length in random.integers(1, longest + 1, 60).tolist():
            writer.append(random.integers(0, 131, length))
        writer.seal()
        writer.publish()
    return str(path)


def data(folder: Path, kind: str) -> dict[str, Any]:
    """Settings of a kind of data set, and of no other."""
    if kind == "synthetic":
        return {"data.train": "builtin:uneven", "data.validation": None}
    one, other = corpus(folder / "one"), corpus(folder / "other", seed=2)
    blend = [{"path": one, "weight": 2.0}, {"path": other, "weight": 1.0}]
    return {"data.train": blend if "blend" in kind else one, "data.validation": None}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("packed blend", PACKED),
        ("blend", MASKED),
        ("synthetic", MASKED),
    ],
)
def test_every_kind_of_data_goes_on_where_it_stopped(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """BL-095, NVIDIA-NeMo/Megatron-Bridge#4565: the same samples, and the same numbers to the last digit."""
    given = {**settings, **data(tmp_path, kind), "checkpoint.every": 2}
    (whole,) = train(1, tmp_path / "whole", {**given, "run.steps": 4})
    first = train(1, tmp_path / "parts", {**given, "run.steps": 2})
    (second,) = train(1, tmp_path / "parts", {**given, "run.steps": 4})
    assert codes([whole, *first, second]) == {0}
    assert sorted(second.samples) == [3, 4]
    assert second.samples == {step: whole.samples[step] for step in (3, 4)}
    assert second.state == whole.state
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_another_packing_is_refused_on_resume_and_nothing_is_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = {**PACKED, **data(tmp_path, "packed"), "checkpoint.every": 1}
    (first,) = train(1, tmp_path / "run", {**base, "run.steps": 1})
    assert first.code == 0
    for changed, words in (
        ({"data.packing": "none"}, "packing was 'best_fit' and is 'none'"),
        ({"data.document_mask": False}, "document_mask was True and is False"),
        ({"data.reset_positions": False}, "reset_positions was True and is False"),
        ({"data.cut_documents": True}, "cut_documents was False and is True"),
    ):
        (again,) = train(1, tmp_path / "run", {**base, **changed, "run.steps": 2})
        assert again.code == 2
        assert again.samples == {}
        assert words in capfd.readouterr().err


def test_a_document_that_is_too_long_is_refused_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**PACKED, "data.train": corpus(tmp_path / "p", longest=30), "data.validation": None, "run.steps": 1}
    (refused,) = train(1, tmp_path / "run", settings)
    assert (refused.code, refused.samples) == (2, {})
    said = capfd.readouterr().err
    assert "tokens, which data.packing=best_fit cannot put into batch.sequence_length=8" in said
    assert "data.cut_documents=true" in said
    (cut,) = train(1, tmp_path / "run", {**settings, "data.cut_documents": True})
    assert (cut.code, sorted(cut.samples)) == (0, [1])


def test_packed_documents_have_the_samples_and_losses_of_one_process_on_two(tmp_path: Path) -> None:
    settings = {**PACKED, **data(tmp_path, "packed blend"), "run.steps": 2, "precision.compute": "float64"}
    (one,) = train(1, tmp_path / "one", settings)
    assert one.code == 0
    for layout in ({"parallel.dp": 2, "batch.micro_size": 1}, {"parallel.tp": 2}):
        folder = tmp_path / "-".join(layout)
        found = train(2, folder, {**settings, **layout})
        assert codes(found) == {0}
        assert sorted({n for rank in found for n in rank.samples[2]}) == sorted(one.samples[2])
        for line, expected in zip(numbers(folder), numbers(tmp_path / "one"), strict=True):
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-9)
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9)
