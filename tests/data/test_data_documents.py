"""Documents within a sequence: bounds, targets and positions that follow them, and nothing new where they are not
asked for.
"""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import config, counting_tokens, write_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data.builtin import Uneven
from ultrascale.data.documents import crosses, positions_within
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.loader import NO_TARGET, Data, MicroArrays

LENGTHS = [5, 0, 1, 1, 30, 0, 0, 12, 2, 40, 3]
"""Of documents: empty ones, single tokens, some longer than a sequence of 16."""


def documents(lengths: list[int]) -> list[list[int]]:
    """Tokens that say where they are: document d holds 10·d, 10·d + 1, …, modulo 250."""
    return [[(10 * d + i) % 250 for i in range(n)] for d, n in enumerate(lengths)]


def begins(lengths: list[int]) -> list[int]:
    """Positions in the stream at which a document with tokens begins."""
    ends = np.cumsum(lengths).tolist()
    return sorted({end - n for end, n in zip(ends, lengths) if n})


@pytest.mark.parametrize("layout", [{}, {"per_sequence": 7}, {"gap": 3}, {"gap": 2, "per_sequence": 4}], ids=str)
def test_the_index_says_where_documents_begin(tmp_path: Path, layout: dict[str, int]) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "p", documents(LENGTHS), **layout))
    for start in range(dataset.tokens + 2):
        for stop in range(start, dataset.tokens + 3, 5):
            found = dataset.document_starts(start, stop)
            assert found.dtype == np.int64
            assert found.tolist() == [at for at in begins(LENGTHS) if start <= at < stop]


def test_documents_without_a_sequence_of_their_own_begin_nowhere(tmp_path: Path) -> None:
    """Megatron writes an empty document as an entry of the document index alone; the last may be one."""
    prefix = write_tokens(tmp_path / "p", [[1, 2, 3], [4, 5]])
    index = Path(f"{prefix}.idx").read_bytes()
    entries = [0, 0, 1, 1, 2, 2, 2]
    head = index[:26] + struct.pack("<Q", len(entries)) + index[34 : -3 * 8]
    Path(f"{prefix}.idx").write_bytes(head + struct.pack(f"<{len(entries)}q", *entries))
    dataset = IndexedDataset(prefix)
    assert [len(dataset[n]) for n in range(dataset.documents)] == [0, 3, 0, 2, 0, 0]
    assert dataset.document_starts(0, 9).tolist() == [0, 3]
    assert dataset.document_starts(1, 5).tolist() == [3]


class Met:
    """A list that counts how often it is looked at."""

    def __init__(self, values: Any) -> None:
        self.values, self.looks = values, 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> Any:
        self.looks += 1
        return self.values[place]


def test_finding_documents_looks_at_few_entries_of_the_index(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "p", [[1, 2, 3]] * 4096))
    dataset._first_sequence = met = Met(dataset._first_sequence)  # type: ignore[assignment]
    assert dataset.document_starts(6000, 6010).tolist() == [6000, 6003, 6006, 6009]
    assert met.looks < 40


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_targets_and_positions_follow_a_plain_description(lengths: list[int], length: int, depth: int) -> None:
    starts = np.cumsum([0, *lengths[:-1]])
    document = [int((starts <= at).sum()) for at in range(length + depth)]
    assert crosses(starts, depth, length).tolist() == [document[i] != document[i + depth] for i in range(length)]
    assert positions_within(starts, length).tolist() == [i - int(starts[document[i] - 1]) for i in range(length)]


def micro(prefix: str, lookahead: int = 1, **settings: Any) -> MicroArrays:
    [found] = Data(config(prefix, **settings), lookahead).batch(1, 0, 1, settings.get("global_size", 8))
    return found


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_a_chunk_of_the_stream_has_the_bounds_that_fall_into_it(lookahead: int, tmp_path: Path) -> None:
    stream = [token for document in documents(LENGTHS) for token in document]
    prefix = write_tokens(tmp_path / "p", documents(LENGTHS))
    found = micro(prefix, lookahead, document_mask=True, global_size=5)
    plain = micro(prefix, lookahead, global_size=5)
    assert plain.documents is None
    assert found.documents is not None
    numbers = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    seen = []
    for column, bounds in enumerate(found.documents):
        inputs = found.inputs[:, column].tolist()
        start = next(s for s in range(0, len(stream), 16) if stream[s : s + 16] == inputs)
        seen.append(start)
        assert list(bounds) == sorted({0, *(at - start for at in begins(LENGTHS) if start <= at < start + 16)})
        for depth, labels in enumerate((found.labels, *found.further_labels), start=1):
            for i, label in enumerate(labels[:, column].tolist()):
                there = start + i + depth < len(stream) and numbers[start + i] == numbers[start + i + depth]
                assert label == (stream[start + i + depth] if there else NO_TARGET)
    assert sorted(seen) == [0, 16, 32, 48, 64]
    assert np.array_equal(found.inputs, plain.inputs)
    assert np.array_equal(found.positions, plain.positions)
    assert any(bounds == (0,) for bounds in found.documents)  # a document longer than a chunk


def test_positions_restart_only_where_that_is_asked_for(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "p", documents(LENGTHS))
    found = micro(prefix, document_mask=True, reset_positions=True)
    assert found.documents is not None
    for column, bounds in enumerate(found.documents):
        expected = [i for start, stop in pairwise((*bounds, 16)) for i in range(stop - start)]
        assert found.positions[:, column].tolist() == expected
    unmasked = micro(prefix, reset_positions=True)
    assert unmasked.documents is None
    assert np.array_equal(unmasked.positions, np.repeat(np.arange(16)[:, None], 8, axis=1))


@pytest.mark.parametrize(
    ("train", "expected"),
    [("blend", "cacc6538e37e90e59bbc6e2730af1e64"), ("builtin:uneven", "12dfad0c6fb8470618cb364d34e12c8f")],
)
def test_without_document_masks_and_packing_batches_are_what_they_were(
    tmp_path: Path, train: str, expected: str
) -> None:
    """Digests of batches as the first version of the package made them."""
    lengths = [1 + d * 5 % 23 for d in range(60)]
    texts = [[(7 * d + i) % 250 for i in range(n)] for d, n in enumerate(lengths)]
    blend = [(write_tokens(tmp_path / "a", texts, per_sequence=9), 3.0), (counting_tokens(tmp_path / "b", 400), 1.0)]
    data = Data(config(blend if train == "blend" else train), lookahead=2)
    digest = hashlib.blake2b(digest_size=16)
    for step in (1, 2, 9, 40):
        for found in data.batch(step, 0, 2, 2):
            assert found.documents is None
            for array in (found.inputs, found.labels, found.positions, *found.further_labels, found.samples):
                digest.update(array.tobytes())
    assert digest.hexdigest() == expected


def uneven(step: int = 1, lookahead: int = 1, side: str = "train", **settings: Any) -> MicroArrays:
    data = Data(config("builtin:uneven", validation="builtin:uneven", vocab_size=131, **settings), lookahead)
    read = data.batch if side == "train" else data.validation_batch
    [found] = read(step, 0, 1, settings.get("global_size", 8))
    return found


def test_synthetic_samples_have_documents_of_uneven_lengths() -> None:
    lengths, single = set(), 0
    for step in range(1, 9):
        found = uneven(step, document_mask=True)
        assert found.documents is not None
        for bounds in found.documents:
            assert bounds[0] == 0
            assert all(a < b for a, b in pairwise(bounds))
            assert bounds[-1] < 16
            lengths |= {stop - start for start, stop in pairwise((*bounds, 16))}
            single += bounds == (0,)
    assert {1, 2, 3, 4, 16} <= lengths
    assert len(lengths) > 8
    assert 5 < single < 40


def test_synthetic_documents_change_targets_at_their_ends_and_nothing_else() -> None:
    lost = 0
    for step in range(1, 6):
        found, plain = (uneven(step, 3, document_mask=mask) for mask in (True, False))
        assert found.documents is not None
        assert np.array_equal(found.labels, uneven(step, packing="best_fit").labels)
        for name in ("inputs", "positions", "samples"):
            assert np.array_equal(getattr(found, name), getattr(plain, name))
        both = zip((found.labels, *found.further_labels), (plain.labels, *plain.further_labels))
        for depth, (labels, before) in enumerate(both, start=1):
            for column, bounds in enumerate(found.documents):
                for i in range(16 - depth):
                    crossing = any(i < start <= i + depth for start in bounds)
                    lost += crossing and before[i, column] != NO_TARGET
                    assert labels[i, column] == (NO_TARGET if crossing else before[i, column])
    assert lost > 50


def test_synthetic_documents_are_a_function_of_seed_side_and_number() -> None:
    def bounds(**settings: Any) -> Any:
        return uneven(document_mask=True, **settings).documents

    assert bounds() == bounds() == bounds(lookahead=3) == bounds(packing="best_fit")
    assert len({bounds(), bounds(seed=2), bounds(step=2), bounds(side="validation")}) == 4
    data = Data(config("builtin:uneven", vocab_size=131, document_mask=True))
    cut = [m.documents for r in range(2) for m in data.batch(1, r, 2, 1)]
    whole = bounds()
    assert sorted(one for [one] in cut) == sorted(whole)


@given(st.integers(1, 6), st.integers(1, 24), st.integers(0, 2**40), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_a_synthetic_sample_with_targets_keeps_one(size: int, length: int, number: int, lookahead: int) -> None:
    source = Uneven(131, 3, size, length, lookahead, documents=True)
    sample = source.read(number)
    assert sample.starts is not None
    assert sample.live is not None
    targets = sample.live[1 : length + 1] & ~crosses(sample.starts, 1, length)
    assert (targets.sum() > 0) == (source.targets(number) > 0)
