"""Packed documents: little padding, whole documents, targets within them, an index that is right or refused."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import config, write_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data import bin_index
from ultrascale.data.bin_index import beside, build, find_or_build
from ultrascale.data.check import check
from ultrascale.data.corpus import stdlib_files
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.inspection import pack
from ultrascale.data.loader import NO_TARGET, Data, differences
from ultrascale.data.packing import Rooms, best_fit, cut

LENGTHS = [5, 0, 1, 1, 16, 0, 12, 2, 9, 3, 15, 7, 4, 1]
"""Of documents, for sequences of 16 tokens."""
LONG = [*LENGTHS, 16 * 3, 16 * 2 + 5, 17, 0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def documents(lengths: list[int]) -> list[list[int]]:
    """No two tokens of the corpus are equal, and none is 0."""
    ends = np.cumsum(lengths).tolist()
    return [list(range(1 + end - n, 1 + end)) for end, n in zip(ends, lengths)]


def corpus(folder: Path, lengths: list[int] = LENGTHS, name: str = "p", **layout: Any) -> str:
    return write_tokens(folder / name, documents(lengths), "<i4", **layout)


def packed(prefix: Any, lookahead: int = 1, **keys: Any) -> Data:
    given = {"packing": "best_fit", "document_mask": True, "vocab_size": 1000, "global_size": 1, **keys}
    return Data(config(prefix, **given), lookahead)


def rows(data: Data, count: int) -> list[Any]:
    """(inputs, labels per depth, positions, documents) of the first samples."""
    found = []
    for step in range(1, count + 1):
        [micro] = data.batch(step, 0, 1, 1)
        labels = [array[:, 0].tolist() for array in (micro.labels, *micro.further_labels)]
        bounds = None if micro.documents is None else micro.documents[0]
        found.append((micro.inputs[:, 0].tolist(), labels, micro.positions[:, 0].tolist(), bounds))
    return found


def naive(lengths: list[int], capacity: int) -> Counter[int]:
    """How many bins are left with which room, by best fit of one piece after the other."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(capacity - length)
    return Counter(rooms)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_pieces_go_where_the_plain_rule_of_best_fit_puts_them(data: st.DataObject) -> None:
    capacity = data.draw(st.sampled_from([1, 2, 7, 30, 1023, 1024, 3000]))
    small = st.integers(1, max(1, capacity // data.draw(st.sampled_from([1, 3, 10]))))
    lengths = data.draw(st.lists(small, min_size=1, max_size=60))
    bins = best_fit(np.array(lengths), capacity)
    filled = np.bincount(bins, weights=lengths).astype(int)
    assert filled.min() > 0  # bins are numbered without holes
    assert Counter((capacity - filled).tolist()) == naive(lengths, capacity)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_pieces_are_the_documents_end_to_end_and_full_but_for_each_last(lengths: list[int], capacity: int) -> None:
    ends = np.cumsum(lengths)
    starts, pieces = cut(ends - lengths, np.array(lengths), capacity)
    expected = [
        (start, min(capacity, end - start)) for n, end in zip(lengths, ends) for start in range(end - n, end, capacity)
    ]
    assert list(zip(starts.tolist(), pieces.tolist())) == expected


def spread(name: str) -> np.ndarray:
    """Lengths of documents, in tokens."""
    random = np.random.default_rng(5)
    if name == "standard library in bytes":
        return np.array([file.size + 1 for file in stdlib_files()])
    if name == "log-normal":
        return np.maximum(1, random.lognormal(6, 1.3, 20_000)).astype(np.int64)
    return (20 * (1 + random.pareto(1.1, 20_000))).astype(np.int64)


@pytest.mark.parametrize("sequence_length", [1024, 4096, 8192])
@pytest.mark.parametrize("name", ["standard library in bytes", "log-normal", "heavy tail"])
def test_less_than_one_percent_of_tokens_is_padding(name: str, sequence_length: int) -> None:
    lengths = spread(name)
    assert lengths.max() > sequence_length  # the tail is there
    _, pieces = cut(np.cumsum(lengths) - lengths, lengths, sequence_length)
    bins = best_fit(pieces, sequence_length)
    assert pieces.sum() == lengths.sum()
    assert 1 - lengths.sum() / ((bins.max() + 1) * sequence_length) < 0.01


def test_a_million_documents_are_placed_by_few_looks_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work, and not time: bins of equal room are dealt with together."""
    looks = 0
    take = Rooms.take

    def counted(self: Any, needed: int) -> Any:
        nonlocal looks
        looks += 1
        return take(self, needed)

    monkeypatch.setattr("ultrascale.data.packing.Rooms.take", counted)
    lengths = np.maximum(1, np.random.default_rng(5).lognormal(6, 1.2, 1_000_000).astype(np.int64)).clip(max=4096)
    told: list[tuple[int, int]] = []
    bins = best_fit(lengths, 4096, lambda done, of: told.append((done, of)))
    assert looks < 100_000
    assert np.bincount(bins, weights=lengths).max() <= 4096
    assert [of for _, of in told] == [1_000_000] * len(told)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] <= 1_000_000


@pytest.mark.parametrize("layout", [{}, {"gap": 3, "per_sequence": 4}], ids=str)
def test_every_document_is_there_whole_and_once_and_the_rest_is_padding(tmp_path: Path, layout: dict[str, int]) -> None:
    prefix = corpus(tmp_path, **layout)
    samples = build(IndexedDataset(prefix), 16, False, tmp_path / "i").bins
    assert samples == -(-sum(LENGTHS) // 16)
    found: list[list[int]] = []
    padding = 0
    for inputs, (labels, deeper), positions, bounds in rows(packed(prefix, lookahead=2, reset_positions=True), samples):
        for start, stop in pairwise((*bounds, 16)):
            text = inputs[start:stop]
            assert positions[start:stop] == list(range(stop - start))
            if text[0] == 0:
                assert stop == 16
                assert text == [0] * len(text)
                assert labels[start:] == deeper[start:] == [NO_TARGET] * len(text)
                padding += len(text)
            else:
                found.append(text)
                assert labels[start:stop] == [*text[1:], NO_TARGET]
                assert deeper[start:stop] == [*text[2:], NO_TARGET, NO_TARGET][: len(text)]
    assert sorted(found) == [document for document in documents(LENGTHS) if document]
    assert padding == samples * 16 - sum(LENGTHS) > 0


def test_documents_of_a_bin_follow_each_other_as_in_the_file(tmp_path: Path) -> None:
    index = build(IndexedDataset(corpus(tmp_path)), 16, False, tmp_path / "i")
    for number in range(index.bins):
        starts = [start for start, _ in index.pieces_of(number)]
        assert starts == sorted(starts)


def test_without_a_mask_packed_documents_still_end_without_a_target(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    for masked, plain in zip(rows(packed(prefix), 6), rows(packed(prefix, document_mask=False), 6)):
        assert masked[:3] == plain[:3]
        assert plain[3] is None
        assert plain[2] == list(range(16))


def test_a_document_that_is_too_long_is_named_with_its_length_and_the_way_out(tmp_path: Path, cache: Path) -> None:
    prefix = corpus(tmp_path, LONG)
    words = (
        r"p\.bin: document 14 has 48 tokens, which data.packing=best_fit cannot put into batch.sequence_length=16, and "
        r"2 more are too long, the longest of 48 tokens; set batch.sequence_length to at least 48, or "
        r"data.cut_documents=true"
    )
    with pytest.raises(DataError, match=words):
        packed(prefix)
    with pytest.raises(DataError, match=words):
        pack(prefix, 16)
    assert not list(tmp_path.glob("*.packed*"))
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]
    packed(prefix, sequence_length=48)


def test_documents_that_are_cut_lose_no_token_and_no_target_but_their_last(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, LONG)
    data = packed(prefix, lookahead=3, cut_documents=True)
    samples = find_or_build(IndexedDataset(prefix), 16, True).bins
    pairs: list[Counter[tuple[int, int]]] = [Counter() for _ in range(3)]
    tokens: list[int] = []
    for inputs, labels, _, _ in rows(data, samples):
        tokens += [token for token in inputs if token]
        for depth in range(3):
            pairs[depth].update((token, label) for token, label in zip(inputs, labels[depth]) if label != NO_TARGET)
    assert sorted(tokens) == [token for document in documents(LONG) for token in document]
    for depth, found in enumerate(pairs, start=1):
        assert found == Counter((d[i], d[i + depth]) for d in documents(LONG) for i in range(len(d) - depth))


def test_an_epoch_has_every_bin_once_and_blends_draw_bins_by_weight(tmp_path: Path) -> None:
    one = corpus(tmp_path, [10, 11, 12, 13], "a")
    other = write_tokens(tmp_path / "b", [[500 + 16 * d + i for i in range(16 - d)] for d in range(6)], "<i4")
    entries = [(one, 1.0), (other, 3.0)]
    found = [inputs for inputs, *_ in rows(packed(entries), 32)]
    sides = np.array([inputs[0] >= 500 for inputs in found])
    assert np.abs(np.cumsum(sides) - 0.75 * np.arange(1, 33)).max() < 1
    alone = [inputs for inputs, *_ in rows(packed([(other, 1.0)]), int(sides.sum()))]
    assert [inputs for inputs, side in zip(found, sides) if side] == alone
    for epoch in range(4):
        assert len({tuple(inputs) for inputs in alone[6 * epoch : 6 * epoch + 6]}) == 6
    position = packed(entries).position(16)
    assert [(one["drawn"], one["epoch"], one["place"]) for one in position["datasets"]] == [(4, 1, 0), (12, 2, 0)]


def test_samples_depend_neither_on_layout_nor_on_what_was_read_before(tmp_path: Path) -> None:
    data = packed(corpus(tmp_path), global_size=8, lookahead=2)

    def step(number: int, replicas: int, micro_size: int) -> dict[int, Any]:
        found = {}
        for replica in range(replicas):
            for micro in data.batch(number, replica, replicas, micro_size):
                assert micro.documents is not None
                for column, sample in enumerate(micro.samples.tolist()):
                    arrays = (micro.inputs, micro.labels, *micro.further_labels, micro.positions)
                    found[sample] = ([array[:, column].tolist() for array in arrays], micro.documents[column])
                for array in (micro.inputs, micro.labels, micro.positions):
                    array[:] = -7  # what a reader does to its arrays is its own affair
        return found

    first = step(1, 1, 8)
    later = step(5, 2, 2)
    assert step(1, 4, 1) == step(1, 2, 4) == first
    assert step(5, 1, 8) == later != first


def test_positions_past_two_to_the_31_are_packed_and_read(tmp_path: Path) -> None:
    lengths = [2**31 - 1, 2**31 - 1, 1000]
    with open(tmp_path / "p.bin", "wb") as file:
        file.truncate(2 * sum(lengths))
        file.seek(2 * (sum(lengths) - 1000))
        file.write(np.arange(1, 1001, dtype="<u2").tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4) + struct.pack("<3i", *lengths)
    index += struct.pack("<3q", 0, 2 * lengths[0], 4 * lengths[0]) + struct.pack("<4q", *range(4))
    (tmp_path / "p.idx").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "p")
    packed_in = build(dataset, 1 << 22, True, tmp_path / "i")
    pieces = [piece for number in range(packed_in.bins) for piece in packed_in.pieces_of(number)]
    assert sum(length for _, length in pieces) == sum(lengths) > 2**32
    assert (sum(lengths) - 1000, 1000) in pieces
    assert dataset.read(*max(pieces)).tolist() == list(range(1, 1001))


def test_an_index_is_built_once_in_the_cache_and_not_where_one_lies_beside_the_tokens(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = corpus(tmp_path)
    expected = rows(packed(prefix), 5)
    [path] = [path for path in cache.iterdir() if path.suffix != ".lock"]
    assert sorted(os.listdir(tmp_path)) == ["cache", "p.bin", "p.idx"]  # a run writes nothing beside its data
    monkeypatch.setattr(bin_index, "build", lambda *given: pytest.fail("built again"))
    assert rows(packed(prefix), 5) == expected
    monkeypatch.undo()
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "none"))
    assert pack(prefix, 16).path == f"{prefix}.packed-16"
    assert Path(f"{prefix}.packed-16").read_bytes() == path.read_bytes()
    assert rows(packed(prefix), 5) == expected
    assert not (tmp_path / "none").exists()


def test_of_many_who_ask_for_a_packing_at_once_one_builds_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes: the lock is on the open file, and each opens its own."""
    prefix = corpus(tmp_path)
    start, built = threading.Barrier(4), []

    def counted(*given: Any) -> Any:
        built.append(given)
        return build(*given)

    def ask(_: int) -> int:
        start.wait()
        return find_or_build(IndexedDataset(prefix), 16, False).bins

    monkeypatch.setattr(bin_index, "build", counted)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))) == [5] * 4
    assert len(built) == 1
    assert len([name for name in os.listdir(cache) if not name.endswith(".lock")]) == 1


def test_a_build_that_is_broken_off_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    prefix = corpus(tmp_path)
    monkeypatch.setattr("ultrascale.data.bin_index.os.fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        pack(prefix, 16)
    assert sorted(os.listdir(tmp_path)) == ["p.bin", "p.idx"]


def test_every_flipped_byte_and_every_length_of_an_index_is_refused(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    path = beside(prefix, 16, False)
    pack(prefix, 16)
    whole = path.read_bytes()
    remedy = rf"build it again with `ultrascale data pack {prefix} --sequence-length 16`"
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataError, match=remedy):
            packed(prefix)
    for size in (0, 1, 119, 120, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=remedy):
            packed(prefix)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match=remedy):
        packed(prefix)
    path.write_bytes(whole)
    packed(prefix)


def test_an_index_of_other_tokens_is_refused(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    pack(prefix, 16)
    corpus(tmp_path, LENGTHS[::-1])
    with pytest.raises(DataError, match=r"packed-16: was built for other tokens than p.bin holds now; build it again"):
        packed(prefix)
    pack(prefix, 16)
    packed(prefix)


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cache for the packing of .*p cannot be written.*ULTRASCALE_CACHE.*data pack"):
        packed(corpus(tmp_path))


def test_a_token_out_of_range_in_a_bin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultrascale.data.loader.SCANNED_TOKENS", 10)
    data = packed(write_tokens(tmp_path / "p", [[1] * 9, [2] * 4 + [300], [3] * 20], "<i4"), vocab_size=257,
                  sequence_length=20)  # fmt: skip
    with pytest.raises(DataError, match=r"p\.bin: token 13 has id 300, outside \[0, 257\)"):
        rows(data, 2)


def test_other_packing_or_masks_are_other_data(tmp_path: Path) -> None:
    prefix = corpus(tmp_path)
    plain = Data(config(prefix, vocab_size=1000)).fingerprint()
    keys = {"packing": "best_fit", "vocab_size": 1000}
    base = Data(config(prefix, **keys)).fingerprint()
    assert json.loads(json.dumps(base)) == base
    for before, keyed, words in (
        (plain, {"packing": "best_fit"}, "packing was 'none' and is 'best_fit'"),
        (base, {**keys, "document_mask": True}, "document_mask was False and is True"),
        (base, {**keys, "reset_positions": True}, "reset_positions was False and is True"),
        (base, {**keys, "cut_documents": True}, "cut_documents was False and is True"),
    ):
        assert differences(before, Data(config(prefix, **{"vocab_size": 1000, **keyed})).fingerprint()) == [words]
    # A run that was saved before there were such settings had none of them.
    old = {key: plain[key] for key in ("global_size", "sequence_length", "seed", "datasets")}
    assert differences(old, plain) == []


def test_settings_without_effect_are_said(tmp_path: Path) -> None:
    def idle(**keys: Any) -> list[str]:
        problems = check(config(**keys))
        assert all(problem.kind == "idle" for problem in problems)
        return [problem.key for problem in problems]

    assert idle(train="p", cut_documents=True) == idle(cut_documents=True) == ["data.cut_documents"]
    assert idle(cut_documents=True, packing="best_fit") == ["data.cut_documents"]
    assert idle(reset_positions=True) == ["data.reset_positions"]
    assert idle(reset_positions=True, document_mask=True) == []
    assert idle(train="p", reset_positions=True, cut_documents=True, packing="best_fit") == []
    assert "data.document_mask=true" in check(config(reset_positions=True))[0].message
    assert "data.packing=best_fit" in check(config("p", cut_documents=True))[0].message
