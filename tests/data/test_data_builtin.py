"""Data without files: the standard library, and samples with uneven targets."""

from __future__ import annotations

import multiprocessing
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from data_cases import config
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data import builtin
from ultrascale.data.builtin import Uneven, open_stdlib, stdlib_prefix
from ultrascale.data.corpus import InputFile
from ultrascale.data.errors import DataError
from ultrascale.data.loader import NO_TARGET, Data
from ultrascale.data.prepare import is_held_out, prepare
from ultrascale.data.tokenizer import ByteTokenizer


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a hundred small modules and a cache of its own."""
    root = tmp_path / "lib"
    (root / "site-packages").mkdir(parents=True)
    (root / "email").mkdir()
    for number in range(100):
        (root / "email" / f"m{number:03d}.py").write_text(f"value = {number}\n" * 5)
    (root / "abc.py").write_text("# first\n")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    (root / "site-packages" / "foreign.py").write_text("never = 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "cache"))
    return root


def texts(validation: bool) -> list[str]:
    dataset = open_stdlib(ByteTokenizer(), validation)
    documents = [dataset[number] for number in range(dataset.documents)]
    assert all(document[-1] == 256 and (document[:-1] < 256).all() for document in documents)
    return [bytes(document[:-1].tolist()).decode() for document in documents]


def test_the_two_sides_of_the_standard_library_are_all_of_it_and_apart(library: Path) -> None:
    train, held_out = texts(False), texts(True)
    assert train[0] == "# first\n"
    assert len(train) + len(held_out) == 101
    assert set(train) & set(held_out) == set()
    assert all(is_held_out(text, 0.02) for text in held_out)
    assert not any(is_held_out(text, 0.02) for text in train)
    assert not any("never" in text for text in train + held_out)


def test_prepare_takes_it_by_name_and_splits_it_alike(library: Path, tmp_path: Path) -> None:
    prepared = prepare(["builtin:stdlib"], tmp_path / "own" / "tokens", validation_fraction=0.02)
    assert prepared.train.documents == len(texts(False))
    assert prepared.validation is None or prepared.validation.documents == len(texts(True))


def test_a_second_use_builds_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stdlib_prefix(ByteTokenizer(), False)
    monkeypatch.setattr(builtin, "_build", lambda *given: pytest.fail("built again"))
    assert stdlib_prefix(ByteTokenizer(), False) == first
    monkeypatch.undo()


def test_other_sources_get_another_folder(library: Path) -> None:
    first = stdlib_prefix(ByteTokenizer(), False)
    (library / "abc.py").write_text("# changed\n")
    second = stdlib_prefix(ByteTokenizer(), False)
    assert first.parent != second.parent
    assert texts(False)[0] == "# changed\n"


def ask(root: str, cache: str, start: object) -> None:
    os.environ["ULTRASCALE_CACHE"] = cache
    sysconfig.get_path = lambda name: root  # type: ignore[assignment, misc]  # of the child alone
    start.wait()  # type: ignore[attr-defined]
    assert open_stdlib(ByteTokenizer(), False).documents > 50


def test_many_processes_may_ask_at_once(library: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    askers = [context.Process(target=ask, args=(str(library), str(tmp_path / "cache"), start)) for _ in range(4)]
    for process in askers:
        process.start()
    for process in askers:
        process.join(30)
    assert [process.exitcode for process in askers] == [0] * 4
    names = [name for name in os.listdir(tmp_path / "cache") if not name.endswith(".lock")]
    assert len(names) == 1


def test_a_host_that_lost_the_race_uses_what_the_winner_made(library: Path) -> None:
    folder = stdlib_prefix(ByteTokenizer(), False).parent
    files = [InputFile(library / "abc.py", 8, True)]
    builtin._build(files, ByteTokenizer(), folder)  # another host, without our lock, comes late
    assert open_stdlib(ByteTokenizer(), False).documents > 50
    assert sorted(name for name in os.listdir(folder.parent) if name.startswith(".")) == []


def test_a_cache_that_cannot_be_written_is_named(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cache for builtin:stdlib cannot be written.*ULTRASCALE_CACHE"):
        stdlib_prefix(ByteTokenizer(), False)


def test_a_damaged_cache_is_refused_with_what_to_remove(library: Path) -> None:
    prefix = stdlib_prefix(ByteTokenizer(), False)
    Path(f"{prefix}.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=f"remove {prefix.parent}"):
        open_stdlib(ByteTokenizer(), False)


def test_the_library_trains_and_validates_through_data(library: Path) -> None:
    data = Data(config("builtin:stdlib", validation="builtin:stdlib"))
    train, held_out = data.batch(1, 0, 1, 8)[0], data.validation_batch(1, 0, 1, 8)[0]
    assert (train.labels[:-1] == train.inputs[1:]).all()
    assert train.inputs.tolist() != held_out.inputs.tolist()
    with pytest.raises(DataError, match=r"data.tokenizer=bytes has ids up to 256.*vocab_size=256.*at least 257"):
        Data(config("builtin:stdlib", vocab_size=256))


@given(st.integers(2, 12), st.integers(1, 40), st.integers(0, 2**40), st.integers(2, 70_000))
@settings(max_examples=60, deadline=None)
def test_uneven_targets_differ_and_one_sequence_has_none(size: int, length: int, batch: int, vocab_size: int) -> None:
    source = Uneven(vocab_size, 3, size, length)
    counts = []
    for number in range(batch * size, (batch + 1) * size):
        sample = source.read(number)
        assert sample.tokens.shape == (length + 1,)
        assert 0 <= sample.tokens.min() <= sample.tokens.max() < vocab_size
        assert sample.live is not None
        assert not sample.live[0]
        counts.append(int(sample.live.sum()))
        assert counts[-1] == source.targets(number)
    assert counts.count(0) == 1
    assert max(counts) <= length
    if size <= length:
        assert len(set(counts)) == size


def test_uneven_samples_are_a_function_of_seed_side_and_number() -> None:
    def tokens(seed: int, side: str, number: int, lookahead: int = 1) -> list[int]:
        return Uneven(131, seed, 4, 20, lookahead, side).read(number).tokens.tolist()

    assert tokens(1, "train", 5) == tokens(1, "train", 5)
    variants = [tokens(1, "train", 5), tokens(2, "train", 5), tokens(1, "validation", 5), tokens(1, "train", 6)]
    assert len({tuple(one) for one in variants}) == 4
    assert tokens(1, "train", 5, lookahead=3)[:21] == tokens(1, "train", 5)


def test_the_sequence_without_targets_is_not_always_the_same_one() -> None:
    source = Uneven(131, 1, 8, 16)
    places = [[source.targets(step * 8 + slot) for slot in range(8)].index(0) for step in range(40)]
    assert len(set(places)) == 8


def test_a_rank_and_a_micro_batch_without_targets_occur() -> None:
    data = Data(config("builtin:uneven", vocab_size=131, global_size=4))
    alive = [[bool((micro.labels != NO_TARGET).any()) for micro in data.batch(1, r, 2, 1)] for r in range(2)]
    assert sum(not live for replica in alive for live in replica) == 1
    lone = Data(config("builtin:uneven", vocab_size=131, global_size=4))
    assert [any((m.labels != NO_TARGET).any() for m in lone.batch(1, r, 4, 1)) for r in range(4)].count(False) == 1


def test_a_global_batch_of_one_sequence_has_targets() -> None:
    [micro] = Data(config("builtin:uneven", global_size=1)).batch(1, 0, 1, 1)
    assert (micro.labels != NO_TARGET).sum() == 8


def test_uneven_labels_are_the_next_tokens_where_they_count() -> None:
    [micro] = Data(config("builtin:uneven"), lookahead=2).batch(2, 0, 1, 8)
    live = micro.labels[:-1] != NO_TARGET
    assert np.array_equal(micro.labels[:-1][live], micro.inputs[1:][live])
    [deeper] = micro.further_labels
    # A token is a target at every depth, or at none.
    assert np.array_equal(deeper[:-1], micro.labels[1:])


def test_uneven_is_not_blended() -> None:
    with pytest.raises(DataError, match="builtin:uneven cannot be blended"):
        Data(config([("builtin:uneven", 1.0), ("p", 1.0)]))
    with pytest.raises(DataError, match="builtin:stdlb: there is no such builtin"):
        Data(config("builtin:stdlb"))
