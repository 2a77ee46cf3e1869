"""Preparing a corpus: same bytes whatever the workers, documents apart, bad input named, nothing
half-written.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from data_cases import config, write_tokens

from ultrascale.data import corpus
from ultrascale.data import prepare as prepare_module
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.inspection import check_prefix, describe
from ultrascale.data.loader import Data
from ultrascale.data.metadata import read_metadata
from ultrascale.data.prepare import Progress, is_held_out, prepare
from ultrascale.data.tokenizer import open_tokenizer


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    raw = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(raw.encode()))
    else:
        path.write_text(raw)
    return path


def documents(prefix: str | Path, tokenizer: str = "bytes") -> list[str]:
    """Texts of a prefix; each must end with the one end of a document."""
    opened, dataset = open_tokenizer(tokenizer), IndexedDataset(prefix)
    found = [dataset[number].tolist() for number in range(dataset.documents)]
    for tokens in found:
        assert tokens.count(opened.end_of_document) == 1
        assert tokens[-1] == opened.end_of_document
    return [opened.decode(tokens) for tokens in found]


TEXTS = [f"document {number}: {'word ' * (number % 7)}naïve 日本\n" for number in range(300)]


@pytest.mark.parametrize("tokenizer", ["bytes", "train:320"])
def test_the_output_is_the_same_whatever_the_number_of_workers(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_ITEMS", 16)  # many pieces for three workers to finish out of order
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    for workers in (1, 3):
        prepare([source], tmp_path / str(workers) / "p", tokenizer, workers, 0.1)
    names = sorted(os.listdir(tmp_path / "1"))
    assert names == sorted(os.listdir(tmp_path / "3"))
    assert len(names) == (6 if tokenizer == "bytes" else 7)
    for name in names:
        one, three = ((tmp_path / workers / name).read_bytes() for workers in ("1", "3"))
        assert one.replace(b"/1/tokenizer.json", b"/3/tokenizer.json") == three, name


def test_documents_are_split_by_their_text_and_keep_their_order(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    prepared = prepare([source], tmp_path / "p", "bytes", 1, 0.2)
    assert prepared.validation is not None
    assert documents(tmp_path / "p") == [text for text in TEXTS if not is_held_out(text, 0.2)]
    assert documents(tmp_path / "p.validation") == [text for text in TEXTS if is_held_out(text, 0.2)]
    assert 30 < prepared.validation.documents < 90
    # A larger fraction holds out more, and all that a smaller one does.
    assert {t for t in TEXTS if is_held_out(t, 0.1)} < {t for t in TEXTS if is_held_out(t, 0.2)}
    data = Data(config(str(tmp_path / "p"), validation=str(tmp_path / "p.validation")))
    assert data.has_validation


def test_a_trained_tokenizer_lies_beside_the_prefix_and_reads_it(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    prepared = prepare([source], tmp_path / "out" / "p", "train:300", 1)
    file = tmp_path / "out" / "tokenizer.json"
    assert prepared.tokenizer == str(file)
    assert documents(tmp_path / "out" / "p", str(file)) == TEXTS
    again = prepare([source], tmp_path / "again" / "p", str(file), 1)
    assert again.train.bin_sha256 == prepared.train.bin_sha256
    Data(config(prepared.prefix, tokenizer=str(file), vocab_size=300))
    with pytest.raises(DataError, match=r"has ids up to 299, which model.vocab_size=299 cannot hold"):
        Data(config(prepared.prefix, tokenizer=str(file), vocab_size=299))
    with pytest.raises(DataError, match=f"data.tokenizer=bytes is not what .* set data.tokenizer={file}"):
        Data(config(prepared.prefix, vocab_size=300))


def test_held_out_text_teaches_the_tokenizer_nothing(tmp_path: Path) -> None:
    texts = [f"{number} common words\n" for number in range(50)]
    secret = next(text for i in range(1000) if is_held_out(text := f"zyxzyx zyxzyx {i} " * 40, 0.2))
    source = write_jsonl(tmp_path / "in.jsonl", [*texts, secret])
    prepare([source], tmp_path / "p", "train:300", 1, 0.2)
    assert "zyx" not in (tmp_path / "tokenizer.json").read_text()
    assert secret in documents(tmp_path / "p.validation", str(tmp_path / "tokenizer.json"))


def test_a_folder_of_source_code_is_read_in_order_and_what_is_no_text_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    for name, raw in {
        "b.py": b"b = 1\n",
        "a/z.py": b"z = 1\n",
        "a/a.c": b"int a;\n",
        "a-b.py": b"ab = 1\n",
        "image.png": b"\x89PNG\xff",
        "zeros.dat": b"\0\0\0",
        "empty.py": b"",
        "blank.py": b" \n\n",
        ".git/config": b"hidden",
        "__pycache__/b.pyc": b"cached",
        "docs.jsonl": b'{"text": "from json"}\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    (folder / "link.py").symlink_to(folder / "b.py")
    prepared = prepare([folder], tmp_path / "p", "bytes", 1)
    assert documents(tmp_path / "p") == ["int a;\n", "z = 1\n", "ab = 1\n", "b = 1\n", "from json"]
    assert (prepared.empty, prepared.not_text) == (2, 2)


@pytest.mark.parametrize("block", [3, 10, 1 << 20])
def test_a_separator_cuts_text_wherever_blocks_end(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", block)
    (tmp_path / "t.txt").write_text("one<|endoftext|>two é\n<|endoftext|><|endoftext|>three")
    prepared = prepare([tmp_path / "t.txt"], tmp_path / "p", "bytes", 1, separator="<|endoftext|>")
    assert documents(tmp_path / "p") == ["one", "two é\n", "three"]
    assert prepared.empty == 1
    assert prepared.input_bytes == os.path.getsize(tmp_path / "t.txt")


def test_compressed_lines_are_the_same_documents(tmp_path: Path) -> None:
    totals = []
    for name in ("a.jsonl", "a.jsonl.gz"):
        source = write_jsonl(tmp_path / name, TEXTS)
        prepared = prepare([source], tmp_path / f"{name}.out", "bytes", 1)
        totals.append((prepared.train.bin_sha256, prepared.input_bytes == source.stat().st_size))
    assert totals[0] == totals[1]
    assert totals[0][1]


BAD_LINES = {
    "not json": ('{"text": "ok"}\n\n{"text": \n', "in.jsonl:3: is not a line of JSON"),
    "a list": ('["text"]\n', "in.jsonl:1: is a JSON list"),
    "no field": ('{"text": "ok"}\n{"body": "x", "id": 1}\n', r"in.jsonl:2: has no field 'text' \(fields: body, id\)"),
    "a number": ('{"text": 5}\n', "in.jsonl:1: field 'text' is a int, not text"),
    "half a pair": ('{"text": "\\ud800"}\n', "in.jsonl:1: field 'text' holds half a surrogate"),
    "deep": ("[" * 100_000 + "\n", "in.jsonl:1: is not a line of JSON"),
}


@pytest.mark.parametrize(("name", "workers"), [*((name, 1) for name in BAD_LINES), ("not json", 2)])
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, name: str, workers: int) -> None:
    content, message = BAD_LINES[name]
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / "in.jsonl"], tmp_path / "out" / "p", "bytes", workers)
    assert os.listdir(tmp_path / "out") == []


def test_bad_input_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 50)[:-12])
    (tmp_path / "nothing").mkdir()
    good = tmp_path / "good.txt"
    good.write_text("good")

    def refused(message: str, *inputs: Path, **options: object) -> None:
        arguments = {"tokenizer": "bytes", "workers": 1, "validation_fraction": 0.0} | options
        with pytest.raises(DataError, match=message):
            prepare(inputs, tmp_path / "out" / "p", **arguments)  # type: ignore[arg-type]

    refused("none: there is no such file or folder", tmp_path / "none")
    refused("latin.txt: is not UTF-8 text \\(byte 3\\)", tmp_path / "latin.txt")
    refused("the inputs hold no text \\(1 empty", tmp_path / "empty.txt")
    refused("there are no files to read", tmp_path / "nothing")
    refused("good.txt: is named twice", good, good)
    refused("cut.jsonl.gz: cannot be read", tmp_path / "cut.jsonl.gz")
    refused("--validation-fraction 1.0 is not in", good, validation_fraction=1.0)
    refused("--workers 0", good, workers=0)
    refused("train:many: write train: and a vocabulary size", good, tokenizer="train:many")
    refused("needs at least 257", good, tokenizer="train:100")
    refused("no such tokenizer file", good, tokenizer=str(tmp_path / "tok.json"))
    refused("all 1 documents fall to validation", good, validation_fraction=1 - 1e-12)
    refused("--separator is empty", good, separator="")
    monkeypatch.setattr(corpus, "LARGEST_DOCUMENT", 3)
    refused("one document of more than .* --separator", good)
    refused("document 1.* is one document of more than", good, separator="#")
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_what_exists_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    first, second = write_jsonl(tmp_path / "a.jsonl", TEXTS[:50]), write_jsonl(tmp_path / "b.jsonl", TEXTS[50:53])
    prepare([first], tmp_path / "p", "bytes", 1, 0.3)
    with pytest.raises(DataError, match=r"p\.bin: exists already.*--overwrite"):
        prepare([second], tmp_path / "p", "bytes", 1)
    assert documents(tmp_path / "p") == [text for text in TEXTS[:50] if not is_held_out(text, 0.3)]
    prepare([second], tmp_path / "p", "bytes", 1, overwrite=True)
    assert documents(tmp_path / "p") == TEXTS[50:53]
    # What the first corpus held out would pass for this one's.
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("p.validation")) == []


def test_a_crash_in_the_middle_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    prepare([source], tmp_path / "out" / "p", "bytes", 1)
    before = {name: (tmp_path / "out" / name).read_bytes() for name in os.listdir(tmp_path / "out")}
    monkeypatch.setattr(corpus, "PIECE_ITEMS", 8)

    def stop(progress: Progress) -> None:
        if progress.documents > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out" / "p", "train:300", 1, overwrite=True, on_progress=stop)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in os.listdir(tmp_path / "out")} == before


def test_progress_ends_at_the_whole_input(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    seen: list[Progress] = []
    prepare([source], tmp_path / "p", "train:300", 1, on_progress=seen.append)
    assert [progress.phase for progress in seen] == ["tokenizer", "tokens"]
    for progress in seen:
        assert progress.bytes_done == progress.bytes_total == source.stat().st_size
        assert progress.documents == 300


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three pieces a worker are read ahead of what is written."""
    monkeypatch.setattr(corpus, "PIECE_ITEMS", 4)
    read = written = most = 0
    original = prepare_module.pieces

    def counted(*arguments: object) -> object:
        nonlocal read, most
        for piece in original(*arguments):  # type: ignore[arg-type]
            read += 1
            most = max(most, read - written)
            yield piece

    def count(progress: Progress) -> None:
        nonlocal written
        written += 1

    monkeypatch.setattr(prepare_module, "pieces", counted)
    prepare([write_jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path / "p", "bytes", 2, on_progress=count)
    assert (read, written) == (75, 75)
    assert most <= 3 * 2


def test_the_sidecar_holds_what_the_files_hold(tmp_path: Path) -> None:
    prepare([write_jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path / "p", "bytes", 1)
    metadata, dataset = read_metadata(tmp_path / "p"), IndexedDataset(tmp_path / "p")
    assert metadata is not None
    stream = dataset.read(0, dataset.tokens)
    assert (metadata.documents, metadata.tokens) == (300, dataset.tokens)
    assert (metadata.max_id, metadata.max_id_at) == (stream.max(), stream.argmax())
    assert describe(tmp_path / "p")["mean_length"] == dataset.tokens / 300
    assert check_prefix(tmp_path / "p").problems == ()


def test_a_corpus_larger_than_the_vocabulary_needs_is_sampled_by_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(prepare_module, "TOKENIZER_TRAINING_BYTES", source.stat().st_size // 4)
    seen: list[Progress] = []
    prepare([source], tmp_path / "p", "train:300", 1, on_progress=seen.append)
    assert 30 < seen[0].documents < 130
    assert seen[-1].documents == 300


def test_a_foreign_file_is_checked_and_recorded(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "p", [[1, 2, 300], [4]], gap=2)
    assert describe(prefix)["max_id"] == 300
    assert check_prefix(prefix).problems == ()
    [problem] = check_prefix(prefix, vocab_size=300).problems
    assert "p.bin: token 2 has id 300, outside [0, 300)" in problem
    assert check_prefix(prefix, record=True).recorded
    with pytest.raises(DataError, match="token 2 has id 300"):
        Data(config(prefix, vocab_size=300, sequence_length=2))


@pytest.mark.parametrize("harm", ["token", "end", "sidecar"])
def test_a_check_sees_what_changed_since(tmp_path: Path, harm: str) -> None:
    # Large enough that the fingerprint's probes do not see every byte.
    prefix = str(tmp_path / "p")
    prepare([write_jsonl(tmp_path / "a.jsonl", ["x" * 400_000, "y" * 400_000])], prefix, "bytes", 1)
    path = Path(f"{prefix}.bin")
    raw = bytearray(path.read_bytes())
    at = 2 * 400_000 if harm == "end" else 20_000
    raw[at : at + 2] = (ord("y") if harm == "token" else ord("x")).to_bytes(2, "little")
    if harm == "sidecar":
        sidecar = Path(f"{prefix}.meta.json")
        sidecar.write_text(sidecar.read_text().replace('"tokens": 800002', '"tokens": 800001'))
    else:
        path.write_bytes(raw)
    problems = " ".join(check_prefix(prefix).problems)
    expected = {
        "token": "p.bin: its SHA-256 is",
        "end": "document 0 does not end with 256",
        "sidecar": "p.meta.json: was written for other files",
    }
    assert expected[harm] in problems


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": "other"}', '{"format": "ultrascale.tokens/1", "tokens": true}']
)
def test_a_sidecar_that_is_none_is_refused_and_can_be_written_anew(tmp_path: Path, content: str) -> None:
    prefix = write_tokens(tmp_path / "p", [[1] * 40])
    Path(f"{prefix}.meta.json").write_text(content)
    with pytest.raises(DataError, match=r"p\.meta\.json: .*ultrascale data check .* --record"):
        Data(config(prefix))
    assert check_prefix(prefix, record=True).recorded
    assert Data(config(prefix)).batch(1, 0, 1, 8)[0].inputs.shape == (16, 8)


def test_the_document_hash_is_uniform() -> None:
    held = np.array([is_held_out(f"text {number}", 0.3) for number in range(4000)])
    assert abs(held.mean() - 0.3) < 5 * np.sqrt(0.21 / 4000)
    assert not any(is_held_out(f"text {number}", 0.0) for number in range(100))
