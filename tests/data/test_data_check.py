"""What a config's data and batch sections may not say, found without opening a file or importing torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from data_cases import config, counting_tokens

from ultrascale.config.problem import Problem
from ultrascale.data.check import check, check_files
from ultrascale.data.tokenizer import train_bpe


def said(problems: list[Problem]) -> str:
    assert all(problem.kind == "error" for problem in problems)
    return " | ".join(f"{problem.key}: {problem.message}" for problem in problems)


def test_a_right_config_has_no_problems() -> None:
    for right in (
        config(),
        config("builtin:stdlib", validation="builtin:stdlib"),
        config([("/far/away/a", 0.7), ("/far/away/b", 0.3)], validation="/far/away/a.validation"),
        config(vocab_size=131, dp=2, ep=2),
        config(dp=None),
        config("builtin:uneven", validation="builtin:uneven"),
    ):
        assert check(right) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (config(global_size=10, dp=2, ep=2), "=10 is no multiple of dp·ep·batch.micro_size = 2·2·2 = 8; .*=8 or 16"),
        (config(global_size=4, dp=2, ep=2), "use batch.global_size=8, or batch.micro_size=1"),
        (config(global_size=12, micro_size=5, dp=2), "use .*=10 or 20, or batch.micro_size=1, 2, 3 or 6"),
        (config(micro_size=0), "batch.micro_size=0 is not at least 1"),
        (config(sequence_length=-1), "batch.sequence_length=-1 is not at least 1"),
        (config("builtin:stdlb"), "data.train=builtin:stdlb is no builtin dataset .* did you mean builtin:stdlib"),
        (config(""), "data.train='' is no path"),
        (config("corpus/p.bin"), "give the prefix without its ending: corpus/p$"),
        (config("corpus.jsonl"), "is text, not tokens; turn it into a prefix with `ultrascale data prepare"),
        (config([]), r"data.train=\[\] names no dataset"),
        (config([("a", 1.0), ("a", 2.0)]), "lists a 2 times; keep one"),
        (config([("a", 1.0), ("b", 0.0)]), "weight 0.0 of a dataset is not a positive number"),
        (config([("a", 1.0), ("builtin:uneven", 1.0)]), "builtin:uneven cannot be blended"),
        (config("a", validation=[("b", 1.0), ("a", 1.0)]), "validation=a is also in data.train.*use a.validation"),
        (config("builtin:stdlib", vocab_size=200), "=200 cannot hold; set model.vocab_size to at least 257"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_key_value_and_way_out(wrong: object, words: str) -> None:
    assert re.search(words, said(check(wrong))), said(check(wrong))


def test_files_that_are_missing_or_empty_are_named(tmp_path: Path) -> None:
    there = counting_tokens(tmp_path / "there", 50)
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "empty.idx").write_bytes(b"x")
    wrong = config([(there, 1.0), (str(tmp_path / "none"), 1.0)], validation=str(tmp_path / "empty"))
    assert check(wrong) == []
    words = said(check_files(wrong))
    assert f"data.train: {tmp_path}/none.bin: cannot be read (No such file" in words
    assert f"{tmp_path}/none.idx" in words
    assert f"data.validation: {tmp_path}/empty.bin: is empty" in words
    assert "there.bin" not in words


def test_a_tokenizer_larger_than_the_model_is_refused_before_the_data(tmp_path: Path) -> None:
    path = str(tmp_path / "tokenizer.json")
    train_bpe(["some text to learn from " * 5], 270, path)
    corpus = counting_tokens(tmp_path / "p", 50)
    assert check_files(config(corpus, tokenizer=path, vocab_size=270)) == []
    words = said(check_files(config(corpus, tokenizer=path, vocab_size=269)))
    assert "has ids up to 269, which model.vocab_size=269 cannot hold; set model.vocab_size to at least 270" in words
    assert "no such tokenizer" in said(check_files(config(corpus, tokenizer=str(tmp_path / "none.json"))))
    assert check_files(config(tokenizer=str(tmp_path / "none.json"))) == []  # builtin:uneven needs none


def test_checking_and_reading_data_import_no_torch_and_no_tokenizers() -> None:
    program = (
        "import sys; import ultrascale.data.check, ultrascale.data.loader, ultrascale.data.commands; "
        "print([name for name in ('torch', 'tokenizers', 'transformers', 'rich') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
