"""`ultrascale data`: what it prints, and its exit status."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from data_cases import write_tokens

from ultrascale.data.commands import add_arguments, run


def data(*words: object) -> int:
    parser = argparse.ArgumentParser("ultrascale data")
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {number}\n"}) + "\n" for number in range(40)))
    return path


def test_a_corpus_is_prepared_described_and_checked(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "p"
    assert data("prepare", source, "--output", prefix, "--workers", 1, "--validation-fraction", 0.2) == 0
    out = capsys.readouterr().out
    assert f"{prefix}.validation: " in out
    sides = f"data.train={prefix} data.validation={prefix}.validation"
    assert f"use with: {sides} data.tokenizer=bytes model.vocab_size=257" in out
    assert data("info", prefix, f"{prefix}.validation") == 0
    out = capsys.readouterr().out
    for words in ("documents", "uint16", "max id           256", "mean length      8.7"):
        assert words in out
    assert data("check", prefix) == 0
    assert ": whole; " in capsys.readouterr().out


def test_json_is_all_that_is_on_standard_output(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "p"
    assert data("prepare", source, "--output", prefix, "--workers", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["train"]["documents"] == 40
    assert data("info", prefix, "--json") == 0
    [info] = json.loads(capsys.readouterr().out)
    assert {"documents", "tokens", "dtype", "max_id", "mean_length"} <= set(info)
    assert data("check", prefix, "--json") == 0
    [checked] = json.loads(capsys.readouterr().out)
    assert checked["whole"]


def test_bad_input_exits_2_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("prepare", tmp_path / "none", "--output", tmp_path / "p", "--json") == 2
    captured = capsys.readouterr()
    assert "none: there is no such file or folder" in captured.err
    assert "none" in json.loads(captured.out)["error"]
    assert data("info", tmp_path / "p") == 2
    assert "p.bin: there is no such file" in capsys.readouterr().err


def test_a_check_of_damaged_files_exits_1_and_goes_on_to_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write_tokens(tmp_path / "good", [[1, 2]]), write_tokens(tmp_path / "bad", [[1, 2]])
    Path(f"{bad}.idx").write_bytes(b"no index")
    assert data("check", bad, good) == 1
    out = capsys.readouterr().out
    assert "bad.idx: begins with" in out
    assert f"{good}: whole; 1 documents, 2 tokens" in out
    assert data("check", good, "--vocab-size", 2) == 1
    assert "token 1 has id 2, outside [0, 2)" in capsys.readouterr().out


def test_documents_are_packed_and_what_it_takes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_tokens(tmp_path / "p", [[1] * 7, [2] * 4, [3] * 3, [4] * 5])
    assert data("pack", prefix, "--sequence-length", 10) == 0
    out = capsys.readouterr().out
    assert f"{prefix}.packed-10: 4 documents in 2 sequences of 10 tokens, 5.000% padding" in out
    assert "the longest document has 7 tokens" in out
    assert "use with: data.packing=best_fit batch.sequence_length=10" in out
    assert data("pack", prefix, "--sequence-length", 5, "--cut-documents", "--json") == 0
    captured = capsys.readouterr()
    [packed] = json.loads(captured.out)
    assert (packed["bins"], packed["path"]) == (4, f"{prefix}.packed-5-cut")
    assert packed["padding_share"] == pytest.approx(0.05)
    assert data("pack", prefix, "--sequence-length", 5) == 2
    assert "document 0 has 7 tokens" in capsys.readouterr().err
    assert data("pack", prefix, "--sequence-length", 0) == 2
    assert "--sequence-length 0 is not at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prepare", "info", "check", "pack"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        data(command, "--help")
    assert caught.value.code == 0
    assert f"ultrascale data {command} " in capsys.readouterr().out.split("example")[1]


def test_help_needs_neither_numpy_nor_torch() -> None:
    program = (
        "import argparse, sys; from ultrascale.data.commands import add_arguments; "
        "add_arguments(argparse.ArgumentParser()); print([n for n in ('numpy', 'torch', 'rich') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
