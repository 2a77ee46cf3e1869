"""Batches: the same samples under every layout, right labels, wrong data refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import config, counting_tokens, write_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.loader import NO_TARGET, Data, MicroArrays, differences
from ultrascale.data.samples import Chunks, EpochOrder


def global_batch(data: Data, step: int, replicas: int, micro_size: int, validation: bool = False) -> dict[int, Any]:
    """sample number → (inputs, labels, positions, further labels) of one step, put together from all
    replicas.
    """
    read = data.validation_batch if validation else data.batch
    rows: dict[int, Any] = {}
    for replica in range(replicas):
        for micro in read(step, replica, replicas, micro_size):
            for column, sample in enumerate(micro.samples.tolist()):
                assert sample not in rows
                arrays = (micro.inputs, micro.labels, micro.positions, *micro.further_labels)
                rows[sample] = [array[:, column].tolist() for array in arrays]
    return rows


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return counting_tokens(tmp_path / "p", 40 * 16 + 5)


@pytest.mark.parametrize("train", ["corpus", "builtin:uneven"])
def test_a_step_has_the_same_samples_under_every_layout(corpus: str, train: str) -> None:
    data = Data(config(corpus if train == "corpus" else train), lookahead=2)
    for step in (1, 2, 7):
        one = global_batch(data, step, 1, 8)
        assert sorted(one) == list(range((step - 1) * 8, step * 8))
        for replicas, micro_size in ((1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)):
            assert global_batch(data, step, replicas, micro_size) == one


def test_micro_batches_take_samples_in_the_stated_order(corpus: str) -> None:
    data = Data(config(corpus))
    samples = [micro.samples.tolist() for micro in data.batch(3, replica=1, replicas=2, micro_size=2)]
    assert samples == [[18, 19], [22, 23]]


def test_labels_are_the_next_tokens_of_the_whole_sequence(corpus: str) -> None:
    for micro in Data(config(corpus), lookahead=3).batch(1, 0, 1, 4):
        assert micro.inputs.shape == micro.labels.shape == micro.positions.shape == (16, 4)
        assert micro.inputs.dtype == micro.labels.dtype == micro.positions.dtype == np.int64
        for depth, labels in enumerate((micro.labels, *micro.further_labels), start=1):
            assert np.array_equal(labels, (micro.inputs + depth) % 257)
        assert np.array_equal(micro.positions[:, 1], np.arange(16))


def test_an_epoch_has_every_chunk_once_and_the_next_another_order(tmp_path: Path) -> None:
    data = Data(config(counting_tokens(tmp_path / "p", 40 * 6 + 1, vocab_size=250), global_size=4, sequence_length=6))
    starts = [row[0][0] for step in range(1, 31) for _, row in sorted(global_batch(data, step, 1, 4).items())]
    epochs = [starts[0:40], starts[40:80], starts[80:120]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 240, 6))
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_batch_depends_neither_on_what_was_read_before_nor_on_threads(corpus: str) -> None:
    data = Data(config([(corpus, 1.0)], validation=corpus))
    wanted = {step: global_batch(Data(config(corpus)), step, 2, 2) for step in range(1, 12)}
    for micro in data.batch(5, 0, 1, 2):
        micro.inputs[:] = micro.labels[:] = -1
    data.validation_batch(3, 0, 1, 2)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda step: global_batch(data, step, 2, 2), sorted(wanted, reverse=True)))
    assert dict(zip(sorted(wanted, reverse=True), found)) == wanted


def test_samples_do_not_depend_on_the_depth_of_prediction(tmp_path: Path) -> None:
    for tokens in range(10 * 16 + 1, 11 * 16 + 1, 3):
        corpus = counting_tokens(tmp_path / "p", tokens, vocab_size=250)
        one, three = (
            {k: row for step in range(1, 6) for k, row in global_batch(Data(config(corpus), depth), step, 1, 4).items()}
            for depth in (1, 3)
        )
        assert {k: row[:3] for k, row in one.items()} == {k: row[:3] for k, row in three.items()}


def test_a_prediction_past_the_end_of_the_data_has_no_target(tmp_path: Path) -> None:
    chunks = Chunks(IndexedDataset(counting_tokens(tmp_path / "p", 2 * 16 + 1)), 16, lookahead=3)
    assert chunks.samples == 2
    assert chunks.read(0).live is None
    last = chunks.read(1)
    assert last.live is not None
    assert last.live.tolist() == [True] * 17 + [False] * 2
    data = Data(config(counting_tokens(tmp_path / "q", 17)), lookahead=3)
    [micro] = data.batch(1, 0, 1, 8)
    assert (micro.labels == NO_TARGET).sum() == 0
    assert [int((labels == NO_TARGET).sum()) for labels in micro.further_labels] == [8, 16]


@given(tokens=st.integers(1, 200), length=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_chunks_cover_the_stream_but_for_the_last_partial_one(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, length: int
) -> None:
    dataset = IndexedDataset(counting_tokens(tmp_path_factory.mktemp("c") / "p", tokens))
    if tokens < length + 1:
        with pytest.raises(DataError, match=f"holds {tokens} tokens.*needs {length + 1}"):
            Chunks(dataset, length)
        return
    chunks = Chunks(dataset, length)
    stream = np.arange(tokens) % 257
    for index in range(chunks.samples):
        assert chunks.read(index).tokens.tolist() == stream[index * length : (index + 1) * length + 1].tolist()
    assert (chunks.samples + 1) * length + 1 > tokens
    with pytest.raises(IndexError):
        chunks.read(chunks.samples)


class Huge:
    name, fingerprint, samples = "huge", "f", 3_000_000_000

    def read(self, index: int) -> Any:
        raise NotImplementedError


def test_epochs_of_three_thousand_million_samples_are_addressed(tmp_path: Path) -> None:
    order = EpochOrder(Huge(), seed=1)
    draws = np.array([0, 2**31, 3_000_000_000, 2**40], np.int64)
    assert order.epochs(draws).tolist() == [0, 0, 1, 2**40 // 3_000_000_000]
    found = order.samples(draws)
    assert ((found >= 0) & (found < Huge.samples)).all()
    assert order.samples(draws[::-1]).tolist() == found[::-1].tolist()


def blend_of(tmp_path: Path) -> list[tuple[str, float]]:
    sizes = {"a": (33, 0), "b": (161, 64), "c": (81, 128)}
    return [
        (write_tokens(tmp_path / name, [[base + i % 60 for i in range(size)]]), weight)
        for (name, (size, base)), weight in zip(sizes.items(), (0.5, 0.3, 0.2))
    ]


def test_a_blend_draws_by_weight_and_each_dataset_in_its_own_order(tmp_path: Path) -> None:
    entries = blend_of(tmp_path)
    data = Data(config(entries))
    rows = [row for step in range(1, 26) for _, row in sorted(global_batch(data, step, 1, 4).items())]
    source = np.array([row[0][0] // 64 for row in rows])
    for number, weight in enumerate((0.5, 0.3, 0.2)):
        counts = np.cumsum(source == number)
        assert np.abs(counts - weight * np.arange(1, 201)).max() < 1
        alone = Data(config([entries[number]], global_size=1))
        mine = [row for row, where in zip(rows, source) if where == number]
        assert mine == [global_batch(alone, step, 1, 1)[step - 1] for step in range(1, len(mine) + 1)]


def test_the_position_is_a_function_of_the_step_and_counts_what_was_drawn(tmp_path: Path) -> None:
    data = Data(config(blend_of(tmp_path)))
    position = data.position(25)
    assert json.loads(json.dumps(position)) == position
    assert (position["step"], position["samples"]) == (25, 200)
    assert [one["drawn"] for one in position["datasets"]] == [100, 60, 40]
    assert [(one["epoch"], one["place"]) for one in position["datasets"]] == [(50, 0), (6, 0), (8, 0)]
    assert data.position(0)["samples"] == 0


def test_another_seed_is_another_order_and_the_same_seed_the_same(corpus: str) -> None:
    one, same, other = (global_batch(Data(config(corpus, seed=seed)), 1, 1, 8) for seed in (1, 1, 2))
    assert one == same != other


def test_moving_the_files_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    one = Data(config(counting_tokens(tmp_path / "p", 700)))
    two = Data(config(counting_tokens(tmp_path / "there" / "q", 700)))
    assert global_batch(one, 3, 1, 8) == global_batch(two, 3, 1, 8)
    assert one.fingerprint() == two.fingerprint()
    assert differences(one.fingerprint(), two.fingerprint()) == []


def test_the_fingerprint_tells_what_would_change_the_samples(tmp_path: Path) -> None:
    entries = blend_of(tmp_path)
    base = Data(config(entries)).fingerprint()
    assert json.loads(json.dumps(base)) == base
    reweighted = [(path, weight) for (path, _), weight in zip(entries, (0.5, 0.25, 0.25))]
    for other, words in (
        (config(entries, seed=2), "seed was 1 and is 2"),
        (config(entries, global_size=16), "global_size was 8 and is 16"),
        (config(entries, sequence_length=8), "sequence_length was 16 and is 8"),
        (config(reweighted), r"weights of the blend were [5, 3, 2] and are [2, 1, 1]"),
        (config(entries[:2]), "not the same tokens (3 datasets before, 2 now)"),
        (config("builtin:uneven"), "not the same tokens"),
    ):
        [clause] = differences(base, Data(other).fingerprint())
        assert words in clause


def test_validation_repeats_itself_and_is_apart_from_training(tmp_path: Path) -> None:
    corpus, held_out = counting_tokens(tmp_path / "p", 500), counting_tokens(tmp_path / "p.validation", 300, base=9)
    data = Data(config(corpus, validation=held_out))
    assert data.has_validation
    assert global_batch(data, 2, 2, 2, validation=True) == global_batch(data, 2, 1, 8, validation=True)
    alone = Data(config(held_out))
    assert global_batch(data, 2, 1, 8, validation=True) == global_batch(alone, 2, 1, 8)
    assert not alone.has_validation
    with pytest.raises(DataError, match=r"data.validation=null"):
        alone.validation_batch(1, 0, 1, 8)


@pytest.mark.parametrize(("dtype", "token"), [("<u2", 300), ("<u2", 257), ("<i4", -5), ("<i8", 2**40)])
def test_a_token_out_of_range_is_refused_with_file_value_and_limit(
    tmp_path: Path, dtype: str, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [1] * 100 + [token] + [1] * 100
    prefix = write_tokens(tmp_path / "p", [tokens], dtype)
    words = rf"p\.bin: token 100 has id {token}, outside \[0, 257\) of model.vocab_size=257"
    with pytest.raises(DataError, match=words):
        Data(config(prefix))
    # A file too large to be read on opening: the batch that has the token refuses it.
    monkeypatch.setattr("ultrascale.data.loader.SCANNED_TOKENS", 10)
    data = Data(config(prefix))
    with pytest.raises(DataError, match=words):
        [data.batch(step, 0, 1, 8) for step in (1, 2)]


def test_a_batch_that_does_not_divide_is_refused(corpus: str) -> None:
    data = Data(config(corpus))
    with pytest.raises(DataError, match=r"global_size=8 is no multiple of 3 replicas × batch.micro_size=2"):
        data.batch(1, 0, 3, 2)
    for step, replica in ((0, 0), (1, 2), (1, -1)):
        with pytest.raises(ValueError):
            data.batch(step, replica, 2, 2)


def test_the_same_data_twice_in_a_blend_are_refused(tmp_path: Path) -> None:
    one, two = counting_tokens(tmp_path / "a", 100), counting_tokens(tmp_path / "b", 100)
    with pytest.raises(DataError, match=r"a and .*b hold the same tokens"):
        Data(config([(one, 1.0), (two, 1.0)]))


def test_arrays_of_a_micro_batch_share_no_memory(corpus: str) -> None:
    [micro] = Data(config(corpus), lookahead=2).batch(1, 0, 1, 8)
    arrays = [micro.inputs, micro.labels, micro.positions, *micro.further_labels, micro.samples]
    assert isinstance(micro, MicroArrays)
    for i, array in enumerate(arrays):
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert not any(np.shares_memory(array, other) for other in arrays[:i])
