"""Tokenizers: round trips, one known end of a document, no special token from text."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data.errors import DataError
from ultrascale.data.tokenizer import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    FileTokenizer,
    open_tokenizer,
    train_bpe,
    vocabulary_size_of_file,
)

TEXT = ["the cat sat on the mat, the dog sat on the log; naïve café 日本語 🙂\n"] * 20


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXT, 290, path)
    return path


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_bytes_give_the_text_back(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ByteTokenizer().decode([*ids.tolist(), 256]) == text
    assert all(0 <= token < 256 for token in ids.tolist())


def test_a_trained_vocabulary_gives_any_text_back(bpe: Path) -> None:
    tokenizer = open_tokenizer(str(bpe))
    assert tokenizer.vocab_size == 290
    for text in (*TEXT[:1], "unseen \x00 \t  spaces  ", "Ωmega 🚀", "", " leading"):
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text
        assert all(0 <= token < 290 for token in ids)
        assert tokenizer.end_of_document not in ids
    assert len(tokenizer.encode(TEXT[0])) < len(TEXT[0].encode()) / 2
    assert [one.tolist() for one in tokenizer.encode_many(TEXT[:3])] == [tokenizer.encode(TEXT[0]).tolist()] * 3


def test_text_cannot_forge_the_end_of_a_document(bpe: Path) -> None:
    tokenizer = open_tokenizer(str(bpe))
    text = f"before {END_OF_DOCUMENT} after"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == text


def test_training_is_repeatable(tmp_path: Path, bpe: Path) -> None:
    train_bpe(TEXT, 290, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == bpe.read_bytes()


def test_the_size_of_a_vocabulary_is_known_without_the_library(bpe: Path) -> None:
    assert vocabulary_size_of_file(bpe) == 290


def with_tokens(path: Path, names: list[str], template: bool = False) -> Path:
    """A word tokenizer with the special tokens `names`, which, with `template`, adds them around each text
    itself.
    """
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "a", "b"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(names)
    if template:
        pairs = [(name, tokenizer.token_to_id(name)) for name in names]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{names[0]} $A {names[-1]}", special_tokens=pairs
        )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("names", "end"),
    [
        (["<s>", "</s>"], "</s>"),
        (["<|begin_of_text|>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["</s>", "<|endoftext|>"], "<|endoftext|>"),
    ],
)
def test_the_known_end_is_found_and_nothing_else_is_added(tmp_path: Path, names: list[str], end: str) -> None:
    tokenizer = FileTokenizer(with_tokens(tmp_path / "tokenizer.json", names, template=True))
    assert tokenizer.end_of_document == 3 + names.index(end)
    # Neither the template's tokens nor truncation nor padding of the file apply.
    assert tokenizer.encode("a b a b a").tolist() == [1, 2, 1, 2, 1]


def test_an_end_may_be_named_or_come_from_the_folder(tmp_path: Path) -> None:
    path = with_tokens(tmp_path / "tokenizer.json", ["<stop>", "</s>"])
    assert FileTokenizer(path).end_of_document == 4
    assert FileTokenizer(path, "<stop>").end_of_document == 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert FileTokenizer(path).end_of_document == 3
    with pytest.raises(DataError, match="has no token 'nope'"):
        FileTokenizer(path, "nope")


def test_no_end_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = with_tokens(tmp_path / "tokenizer.json", ["<stop>"])
    with pytest.raises(DataError, match="--end-of-document TOKEN"):
        FileTokenizer(path)


def test_a_worker_gets_the_same_tokenizer(tmp_path: Path) -> None:
    path = with_tokens(tmp_path / "tokenizer.json", ["<stop>", "</s>"])
    copy = pickle.loads(pickle.dumps(FileTokenizer(path, "<stop>")))
    assert (copy.end_of_document, copy.name) == (3, str(path))


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[1]", b'{"model": {"vocab": 3}}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    for read in (FileTokenizer, vocabulary_size_of_file):
        with pytest.raises(DataError, match=r"t\.json: is (no tokenizer\.json|empty)"):
            read(path)


def test_a_missing_tokenizer_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no such tokenizer file; data.tokenizer is `bytes` or"):
        open_tokenizer(str(tmp_path / "none.json"))
    with pytest.raises(DataError, match=r"is a folder; name the tokenizer.json in it"):
        open_tokenizer(str(tmp_path))


def test_without_the_library_the_pip_command_is_said(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'pip install "ultrascale\[hf\]"'):
        open_tokenizer(str(bpe))


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train:256: a byte-level vocabulary needs at least 257"):
        train_bpe(TEXT, 256, tmp_path / "t.json")
