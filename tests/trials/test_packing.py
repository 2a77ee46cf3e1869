"""What went wrong with tokenizers and packing: separators that were not there, ends and padding that were mixed up, ids
that wrapped, indices that only one host built.

Held elsewhere:

| report | where |
|---|---|
| BL-095 packed data restart on resume | `tests/trainer/test_trainer_packing.py`: every kind of data set goes on where it stopped |
| BL-101 32-bit positions | `tests/data/test_data_packing.py`, `test_data_indexed.py`: past 2³¹ tokens; `test_data_loader.py`: 3·10⁹ samples |
| BL-182, BL-184 documents and padding that are seen | `test_long_sequences.py`; which documents are told to attention is below |
"""  # noqa: E501

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from small import config_of
from ultrascale.data.bin_index import find_or_build
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.loader import NO_TARGET, Data, MicroArrays
from ultrascale.data.prepare import prepare
from ultrascale.data.tokenizer import train_bpe
from ultrascale.data.writer import IndexedWriter

TEXTS = ["a b b a", "b", "a b <|endoftext|> a", "</s> b a", "b b b b b b b b b", "a"]
"""Documents; two of them spell what ends documents elsewhere."""
PACKED = {"data.packing": "best_fit", "data.document_mask": True}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "cache"))


def words(folder: Path) -> str:
    """A tokenizer of words that wraps every text into `<s>` and `</s>`; `<|endoftext|>` is several of its words."""
    vocabulary = {
        word: number for number, word in enumerate(["[UNK]", "a", "b", "<|", "endoftext", "|>", "</", "s", ">"])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    tokenizer.save(str(folder / "words.json"))
    return str(folder / "words.json")


def byte_level(folder: Path) -> str:
    train_bpe(TEXTS * 5, 265, folder / "bpe.json")
    return str(folder / "bpe.json")


def prepared(folder: Path, tokenizer: str) -> str:
    lines = folder / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare([lines], folder / "p", tokenizer, workers=1)
    return str(folder / "p")


def batches(train: str, steps: int, **settings: Any) -> list[MicroArrays]:
    given = {"data.train": train, "model.vocab_size": 300, "batch.global_size": 1, **settings}
    data = Data(config_of({key.replace("__", "."): value for key, value in given.items()}))
    return [micro for step in range(1, steps + 1) for micro in data.batch(step, 0, 1, 1)]


def epoch(train: str, tokenizer: str, length: int) -> list[MicroArrays]:
    """Every bin of a packed corpus."""
    bins = find_or_build(IndexedDataset(train), length, False).bins
    settings = {**PACKED, "batch.sequence_length": length, "data.tokenizer": tokenizer}
    return batches(train, bins, **settings)


TOKENIZERS = {"bytes": lambda folder: "bytes", "byte-level": byte_level, "words": words}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_document_ends_with_the_one_known_separator_and_documents_are_told_apart_there(
    name: str, tmp_path: Path
) -> None:
    """BL-107, huggingface/datatrove#489: whatever a tokenizer adds of its own, and whatever a text spells."""
    tokenizer = TOKENIZERS[name](tmp_path)
    prefix = prepared(tmp_path, tokenizer)
    end = json.loads(Path(f"{prefix}.meta.json").read_text())["end_of_document"]
    dataset = IndexedDataset(prefix)
    assert [int((dataset[n] == end).sum()) for n in range(len(TEXTS))] == [1] * len(TEXTS)
    assert [int(dataset[n][-1]) for n in range(len(TEXTS))] == [end] * len(TEXTS)

    length = max(len(dataset[n]) for n in range(len(TEXTS)))
    told = 0
    for micro in epoch(prefix, tokenizer, length):
        assert micro.documents is not None
        inputs, labels = micro.inputs[:, 0], micro.labels[:, 0]
        (bounds,) = micro.documents
        for start, stop in pairwise((*bounds, length)):
            if inputs[start:stop].any():  # what is all 0 is padding
                told += 1
                assert (np.flatnonzero(inputs[start:stop] == end) + start).tolist() == [stop - 1]
                assert labels[stop - 1] == NO_TARGET
    assert told == len(TEXTS)


def test_an_end_that_has_the_id_of_padding_is_trained(tmp_path: Path) -> None:
    """BL-108, huggingface/transformers#23530: padding is id 0, and so is the end of a document here."""
    tokenizer = byte_level(tmp_path)
    prefix = prepared(tmp_path, tokenizer)
    found = epoch(prefix, tokenizer, 40)
    assert json.loads(Path(f"{prefix}.meta.json").read_text())["end_of_document"] == 0
    padding = sum(micro.inputs.size for micro in found) - IndexedDataset(prefix).tokens
    assert padding > 0
    assert sum(int((micro.inputs == 0).sum()) for micro in found) == len(TEXTS) + padding
    assert sum(int((micro.labels == 0).sum()) for micro in found) == len(TEXTS)  # every end is a target, no padding is


@pytest.mark.parametrize("largest", [65498, 65499, 65535, 65536, 119546])
def test_large_ids_come_back_as_they_were(largest: int, tmp_path: Path) -> None:
    """BL-109, princeton-nlp/LLM-Shearing#65."""
    ids = [largest // 2, largest, 1, largest - 1, 7, largest, 2, 3, largest]
    with IndexedWriter(tmp_path / "p", largest + 1) as writer:
        writer.append(np.array(ids))
        writer.seal()
        writer.publish()
    assert IndexedDataset(tmp_path / "p").dtype.itemsize == (2 if largest < 65499 else 4)
    for packing in ("none", "best_fit"):
        settings = {"data.packing": packing, "batch.sequence_length": 8 if packing == "none" else 9}
        (micro,) = batches(str(tmp_path / "p"), 1, **{"model.vocab_size": largest + 1, **settings})
        assert micro.inputs[:, 0].tolist() == ids[: settings["batch.sequence_length"]]
        with pytest.raises(DataError, match=rf"has id {largest}, outside \[0, {largest}\)"):
            batches(str(tmp_path / "p"), 1, **{"model.vocab_size": largest, **settings})


def test_targets_are_the_tokens_less_one_for_each_document(tmp_path: Path) -> None:
    """BL-110, axolotl-ai-cloud/axolotl#2227: with packing nothing is counted that pads, and without it nothing pads."""
    prefix = prepared(tmp_path, "bytes")
    dataset = IndexedDataset(prefix)
    found = epoch(prefix, "bytes", 60)
    assert sum(micro.inputs.size for micro in found) > dataset.tokens
    assert sum(int((micro.labels != NO_TARGET).sum()) for micro in found) == dataset.tokens - len(TEXTS)

    chunks = (dataset.tokens - 1) // 6
    plain = batches(prefix, chunks, **{"batch.sequence_length": 6})
    assert sum(int((micro.labels != NO_TARGET).sum()) for micro in plain) == 6 * chunks
    masked = batches(prefix, chunks, **{"batch.sequence_length": 6, "data.document_mask": True})
    ends = int((dataset.read(0, 6 * chunks) == 256).sum())
    assert sum(int((micro.labels != NO_TARGET).sum()) for micro in masked) == 6 * chunks - ends
    assert ends > 2


def test_hosts_that_share_no_folder_build_the_same_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BL-103, NVIDIA/Megatron-LM#907: from the data alone, and with nothing written beside them."""
    prefix = prepared(tmp_path, "bytes")
    before = sorted(os.listdir(tmp_path))
    made = []
    for host in ("one", "two"):
        cache = tmp_path.parent / f"{tmp_path.name}-{host}"
        monkeypatch.setenv("ULTRASCALE_CACHE", str(cache))
        found = [micro.inputs.tolist() for micro in epoch(prefix, "bytes", 40)]
        [index] = cache.glob("packed-*-v1")
        made.append((found, index.name, index.read_bytes()))
    assert made[0] == made[1]
    assert sorted(os.listdir(tmp_path)) == before
