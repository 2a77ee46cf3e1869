"""Token files: the layout of existing corpora, damage refused by name, reads that depend on nothing."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from data_cases import STRUCT_CODES, write_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.writer import IndexedWriter

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
STREAM = list(range(1, 12))


@pytest.fixture(params=[1, 2, 1 << 20])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Entries of an index that are looked at, and written, in one go."""
    monkeypatch.setattr("ultrascale.data.indexed._BLOCK", request.param)
    monkeypatch.setattr("ultrascale.data.writer._BLOCK", request.param)
    return int(request.param)


@pytest.mark.parametrize("dtype", sorted(STRUCT_CODES))
@pytest.mark.parametrize(("gap", "per_sequence"), [(0, None), (0, 2), (3, None), (3, 2)])
def test_files_in_the_layout_are_read_back(
    tmp_path: Path, dtype: str, gap: int, per_sequence: int | None, block: int
) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "p", DOCUMENTS, dtype, gap, per_sequence))
    assert (dataset.documents, dataset.tokens, dataset.dtype) == (4, 11, np.dtype(dtype))
    assert [dataset[i].tolist() for i in range(4)] == DOCUMENTS
    for start in range(12):
        for count in range(12 - start):
            assert dataset.read(start, count).tolist() == STREAM[start : start + count]
    assert dataset.at(np.array([10, 0, 4])).tolist() == [11, 1, 5]
    assert np.concatenate(list(dataset.document_lengths())).tolist() == [3, 1, 5, 2]
    found = dataset.scan()
    assert (found.min_id, found.min_id_at, found.max_id, found.max_id_at) == (1, 0, 11, 10)


@given(
    documents=st.lists(st.lists(st.integers(0, 65499), max_size=9), min_size=1, max_size=8).filter(any),
    longest=st.integers(1, 12),
)
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_the_layout_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], longest: int
) -> None:
    folder = tmp_path_factory.mktemp("w")
    with IndexedWriter(folder / "ours", 65499 + 1, longest_sequence=longest) as writer:
        for document in documents:
            writer.append(np.array(document, np.int64))
        writer.seal()
        writer.publish()
    dtype = "<i4"  # 65500 ids and more are int32
    write_tokens(folder / "theirs", documents, dtype, per_sequence=longest)
    for ending in (".bin", ".idx"):
        assert (folder / f"ours{ending}").read_bytes() == (folder / f"theirs{ending}").read_bytes()
    assert sorted(os.listdir(folder)) == [
        "ours.bin",
        "ours.idx",
        "ours.meta.json",
        "theirs.bin",
        "theirs.idx",
    ]


def test_an_index_of_many_blocks_is_written_right(tmp_path: Path, block: int) -> None:
    with IndexedWriter(tmp_path / "ours", 300, longest_sequence=2) as writer:
        writer.append_many(np.array(STREAM), np.array([len(document) for document in DOCUMENTS]))
        writer.seal()
        writer.publish()
    write_tokens(tmp_path / "theirs", DOCUMENTS, per_sequence=2)
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_the_type_of_a_token_follows_from_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    with IndexedWriter(tmp_path / "p", vocab_size) as writer:
        writer.append(np.array([0, vocab_size - 1]))
        writer.seal()
        writer.publish()
    dataset = IndexedDataset(tmp_path / "p")
    assert dataset.dtype.name == dtype
    assert dataset[0].tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("token", [65536, 300, -1])
def test_an_id_that_the_vocabulary_lacks_is_never_written(tmp_path: Path, token: int) -> None:
    with (
        IndexedWriter(tmp_path / "p", 300) as writer,
        pytest.raises(DataError, match=rf"{token} is outside \[0, 300\)"),
    ):
        writer.append(np.array([1, token, 2]))
    assert os.listdir(tmp_path) == []


def test_nothing_takes_its_name_before_publish(tmp_path: Path) -> None:
    before = write_tokens(tmp_path / "p", DOCUMENTS)
    with IndexedWriter(before, 300) as writer:
        writer.append(np.array([1]))
        writer.seal()
    assert IndexedDataset(before).tokens == 11
    assert sorted(os.listdir(tmp_path)) == ["p.bin", "p.idx"]


def sparse(prefix: Path, lengths: list[int], gap_bytes: int = 0) -> tuple[str, int]:
    """Files of zeros that take no room on the disk."""
    offsets = [sum(lengths[:i]) * 2 + i * gap_bytes for i in range(len(lengths))]
    size = sum(lengths) * 2 + (len(lengths) - 1) * gap_bytes
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(size)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *offsets)
    index += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    Path(f"{prefix}.idx").write_bytes(index)
    return str(prefix), size


@pytest.mark.parametrize("gap_bytes", [0, 1 << 32])
def test_tokens_past_two_to_the_31_are_read_where_they_lie(tmp_path: Path, gap_bytes: int) -> None:
    prefix, size = sparse(tmp_path / "p", [2**31 - 1, 2**31 - 1, 1000], gap_bytes)
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(size - 2 * 10)
        file.write(np.arange(1, 11, dtype="<u2").tobytes())
    dataset = IndexedDataset(prefix)
    total = 2 * (2**31 - 1) + 1000
    assert dataset.tokens == total > 2**32
    assert dataset.read(total - 12, 12).tolist() == [0, 0, *range(1, 11)]
    assert dataset[2][-3:].tolist() == [8, 9, 10]
    assert dataset.at(np.array([total - 1])).tolist() == [10]
    assert dataset.read(2**31 - 3, 5).tolist() == [0] * 5


def test_what_was_read_can_be_changed_without_changing_the_data(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "p", DOCUMENTS, "<i8"))
    for read in (lambda: dataset.read(2, 4), lambda: dataset[2], lambda: dataset.at(np.arange(3))):
        before = read().copy()
        read()[:] = -100
        assert np.array_equal(read(), before)


def test_a_dataset_travels_to_a_worker_by_name(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "p", [list(range(5000))]))
    packed = pickle.dumps(dataset)
    assert len(packed) < 500
    assert pickle.loads(packed).read(0, 5000).tolist() == list(range(5000))


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    one = IndexedDataset(write_tokens(tmp_path / "p", DOCUMENTS)).fingerprint
    assert IndexedDataset(write_tokens(tmp_path / "elsewhere" / "q", DOCUMENTS)).fingerprint == one
    changed = [*DOCUMENTS[:3], [10, 12]]
    assert IndexedDataset(write_tokens(tmp_path / "r", changed)).fingerprint != one
    recut = [[1, 2], [3, 4], *DOCUMENTS[2:]]
    assert IndexedDataset(write_tokens(tmp_path / "s", recut)).fingerprint != one


def patched(at: int, form: str, value: int):  # type: ignore[no-untyped-def]
    def patch(raw: bytes) -> bytes:
        packed = struct.pack(form, value)
        return raw[:at] + packed + raw[at + len(packed) :]

    return patch


# The index of DOCUMENTS: header 34, lengths 34 + 4·4 = 50, offsets 50 + 8·4 = 82, documents 82 + 8·5 = 122.
DAMAGE = {
    "magic": ("idx", patched(0, "<B", 0), "begins with"),
    "version": ("idx", patched(9, "<Q", 2), "version 2"),
    "type code": ("idx", patched(17, "<B", 9), "type code 9"),
    "float tokens": ("idx", patched(17, "<B", 7), "float32"),
    "other width": ("idx", patched(17, "<B", 4), "bytes"),
    "sequence count": ("idx", patched(18, "<Q", 5), "cut short or is corrupt"),
    "huge sequence count": ("idx", patched(18, "<Q", 2**63), "cut short or is corrupt"),
    "document count": ("idx", patched(26, "<Q", 2**64 - 1), "cut short or is corrupt"),
    "no documents": ("idx", lambda raw: raw[:18] + struct.pack("<QQq", 0, 1, 0), "lists no documents"),
    "negative length": ("idx", patched(34, "<i", -3), "sequence 0: length -3 is negative"),
    "long length": ("idx", patched(46, "<i", 3), "sequence 3: .* reach past 22 bytes"),
    "offset past the end": ("idx", patched(74, "<q", 2**62), "sequence 3: .* reach past 22 bytes"),
    "negative offset": ("idx", patched(50, "<q", -2), "sequence 0: byte offset -2 lies before"),
    "odd offset": ("idx", patched(58, "<q", 7), "no multiple of 2"),
    "falling offset": ("idx", patched(66, "<q", 0), "sequence 2: byte offset 0 lies before"),
    "first document": ("idx", patched(82, "<q", 1), "documents span sequences 1 to 4"),
    "last document": ("idx", patched(114, "<q", 3), "documents span sequences 0 to 3"),
    "falling documents": ("idx", patched(90, "<q", 3), "document 1 ends before it begins"),
    "cut index": ("idx", lambda raw: raw[:-1], "cut short or is corrupt"),
    "cut header": ("idx", lambda raw: raw[:20], "less than the header"),
    "long index": ("idx", lambda raw: raw + b"\0", "cut short or is corrupt"),
    "modes": ("idx", lambda raw: raw + b"\0" * 4, "multimodal"),
    "empty index": ("idx", lambda raw: b"", "is empty"),
    "empty tokens": ("bin", lambda raw: b"", "is empty"),
    "cut tokens": ("bin", lambda raw: raw[:-2], "reach past 20 bytes"),
    "half a token": ("bin", lambda raw: raw[:-1], "no whole number"),
    "more tokens": ("bin", lambda raw: raw + b"\0\0", "accounts for 22"),
    "text": (
        "idx",
        lambda raw: b"not an index, only some text that somebody wrote",
        "no index of a token file",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_and_named(tmp_path: Path, name: str, block: int) -> None:
    ending, damage, message = DAMAGE[name]
    prefix = write_tokens(tmp_path / "p", DOCUMENTS)
    path = Path(f"{prefix}.{ending}")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(tmp_path / "p") in str(caught.value)


@given(st.binary(max_size=200), st.binary(max_size=64))
@settings(max_examples=150, deadline=None)
def test_no_bytes_whatever_are_taken_for_an_index_or_crash(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, tokens: bytes
) -> None:
    folder = tmp_path_factory.mktemp("f")
    (folder / "p.bin").write_bytes(tokens)
    (folder / "p.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + tail)
    try:
        dataset = IndexedDataset(folder / "p")
    except DataError:
        return
    assert len(dataset.read(0, dataset.tokens)) == dataset.tokens


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, ending: str) -> None:
    prefix = write_tokens(tmp_path / "p", DOCUMENTS)
    os.unlink(f"{prefix}.{ending}")
    with pytest.raises(DataError, match=rf"p\.{ending}: there is no such file"):
        IndexedDataset(prefix)


def test_a_prefix_with_its_ending_gets_the_prefix_named(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "p", DOCUMENTS)
    with pytest.raises(DataError, match=f"without its ending: {prefix}"):
        IndexedDataset(f"{prefix}.bin")


def test_reads_outside_the_stream_are_refused(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_tokens(tmp_path / "p", DOCUMENTS))
    for start, count in ((-1, 2), (11, 1), (0, 12), (5, -1)):
        with pytest.raises(IndexError):
            dataset.read(start, count)
    for document in (-1, 4):
        with pytest.raises(IndexError):
            dataset[document]
