"""Token files in the Megatron indexed-dataset layout: PREFIX.bin (tokens) and PREFIX.idx (where each document
lies).

PREFIX.idx, little-endian (Megatron-LM, core/datasets/indexed_dataset.py):

    bytes   type            what
    0       9 bytes         magic "MMIDIDX", two zero bytes
    9       u64             version = 1
    17      u8              type of a token: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16 (6 and 7 are floats:
                            refused here)
    18      u64             S, number of sequences
    26      u64             D + 1, number of documents plus one
    34      i32[S]          tokens of each sequence
            i64[S]          byte offset of each sequence in PREFIX.bin
            i64[D + 1]      first sequence of each document; begins with 0, ends with S

PREFIX.bin has no header.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.errors import DataError

Ints = NDArray[np.int64]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CODES = {np.dtype(text): code for code, text in DTYPES.items()}
FLOAT_CODES = {6: "float64", 7: "float32"}

_BLOCK = 1 << 20  # entries of the index, or tokens, looked at in one go
_PROBES, _PROBE_BYTES = 64, 4096


def bin_path(prefix: str | Path) -> Path:
    """PREFIX.bin."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """PREFIX.idx."""
    return Path(f"{prefix}.idx")


@dataclass(frozen=True)
class TokenRange:
    """Smallest and largest id of a token file, and the indices of their first tokens in the stream."""

    min_id: int
    min_id_at: int
    max_id: int
    max_id_at: int


class IndexedDataset:
    """The documents of PREFIX.bin and PREFIX.idx, and their tokens as one stream.

    documents, tokens   numbers of them (Python ints, any size)
    dtype               type of a stored token
    fingerprint         32 hex digits that say what the content is, not where it lies: BLAKE2b of the
                        whole index, the size of the token file and 64 blocks of 4 KiB spread over it
    Reading maps the file and copies: what is returned is fresh, int64, and the same whatever was read before.

    Raises DataError, naming the file, when one is missing, empty, of another format, or when the index
    contradicts itself or the token file. The whole index is looked at once, in blocks.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = bin_path(prefix), idx_path(prefix)
        bin_bytes = _size(self.bin_path, self.prefix)
        idx_bytes = _size(self.idx_path, self.prefix)
        self.dtype, sequences, document_entries = _read_header(self.idx_path, idx_bytes)
        if bin_bytes % self.dtype.itemsize:
            raise DataError(f"{self.bin_path}: {bin_bytes} bytes are no whole number of {self.dtype.name} tokens")
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r", shape=(idx_bytes,))
        lengths_at = HEADER.size
        offsets_at = lengths_at + 4 * sequences
        documents_at = offsets_at + 8 * sequences
        self._lengths: NDArray[Any] = _view(index, "<i4", lengths_at, sequences)
        self._offsets: NDArray[Any] = _view(index, "<i8", offsets_at, sequences)
        self._first_sequence: NDArray[Any] = _view(index, "<i8", documents_at, document_entries)
        self.documents = document_entries - 1
        self.tokens, contiguous = self._check_sequences(bin_bytes)
        self._check_documents(sequences)
        self._bin: NDArray[Any] = np.memmap(
            self.bin_path, dtype=self.dtype, mode="r", shape=(bin_bytes // self.dtype.itemsize,)
        )
        # Files with gaps need the start of each sequence in the stream; in all others the stream is the file.
        self._starts: Ints | None = None
        if not contiguous:
            self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths, dtype=np.int64)])
        self.fingerprint = _fingerprint(index, self.bin_path, bin_bytes)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        # A pickled memory map is a copy of the file: workers open it themselves.
        return IndexedDataset, (self.prefix,)

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, document: int) -> Ints:
        """Tokens [n] of one document, from 0. Raises IndexError outside [0, documents)."""
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.prefix}: document {document} is not in [0, {self.documents})")
        first, end = int(self._first_sequence[document]), int(self._first_sequence[document + 1])
        parts = [self._sequence(number) for number in range(first, end)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def document_lengths(self) -> Iterator[Ints]:
        """Tokens of each document, in order; int64 arrays of up to a million documents."""
        for low in range(0, self.documents, _BLOCK):
            first = np.asarray(self._first_sequence[low : low + _BLOCK + 1], dtype=np.int64)
            sums = np.cumsum(self._lengths[first[0] : first[-1]], dtype=np.int64)
            sums = np.concatenate([np.zeros(1, np.int64), sums])
            yield np.diff(sums[first - first[0]])

    def document_starts(self, start: int, stop: int) -> Ints:
        """Tokens of the stream in [start, stop) at which a document begins, ascending; empty documents begin nowhere.

        Looks only at the index entries that a binary search meets.
        """
        # Not np.searchsorted, which copies the whole index where it is not aligned.
        numbers = range(self.documents)
        low = bisect_left(numbers, start, key=self._document_start)
        high = bisect_left(numbers, min(stop, self.tokens), lo=low, key=self._document_start)
        return np.unique(np.array([self._document_start(number) for number in numbers[low:high]], np.int64))

    def read(self, start: int, count: int) -> Ints:
        """Tokens [start, start + count) of the concatenated documents; int64 [count]. Raises IndexError
        outside the stream.
        """
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"{self.prefix}: tokens [{start}, {start + count}) are not in [0, {self.tokens})")
        if self._starts is None:
            return self._bin[start : start + count].astype(np.int64)
        result = np.empty(count, np.int64)
        filled = 0
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < count:
            skip = start + filled - int(self._starts[number])
            piece = self._sequence(number, skip, count - filled)
            result[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return result

    def at(self, positions: Ints) -> Ints:
        """Tokens [n] at positions [n] of the stream, each in [0, tokens)."""
        if self._starts is None:
            return self._bin[positions].astype(np.int64)
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        inside = self._offsets[numbers] // self.dtype.itemsize + positions - self._starts[numbers]
        return self._bin[inside].astype(np.int64)

    def scan(self) -> TokenRange:
        """Reads every token. Raises DataError when there are none."""
        best: TokenRange | None = None
        for start in range(0, self.tokens, _BLOCK):
            block = self.read(start, min(_BLOCK, self.tokens - start))
            low, high = int(block.argmin()), int(block.argmax())
            if best is None:
                best = TokenRange(int(block[low]), low, int(block[high]), high)
                continue
            lower, higher = int(block[low]) < best.min_id, int(block[high]) > best.max_id
            best = TokenRange(
                int(block[low]) if lower else best.min_id,
                start + low if lower else best.min_id_at,
                int(block[high]) if higher else best.max_id,
                start + high if higher else best.max_id_at,
            )
        if best is None:
            raise DataError(f"{self.bin_path}: its documents hold no tokens")
        return best

    def _document_start(self, document: int) -> int:
        sequence = int(self._first_sequence[document])
        if sequence == len(self._lengths):
            return self.tokens
        if self._starts is None:
            return int(self._offsets[sequence]) // self.dtype.itemsize
        return int(self._starts[sequence])

    def _sequence(self, number: int, skip: int = 0, at_most: int | None = None) -> Ints:
        start = int(self._offsets[number]) // self.dtype.itemsize
        end = start + int(self._lengths[number])
        if at_most is not None:
            end = min(end, start + skip + at_most)
        return self._bin[start + skip : end].astype(np.int64)

    def _check_sequences(self, bin_bytes: int) -> tuple[int, bool]:
        """(tokens, whether the sequences lie back to back). Raises DataError."""
        size = self.dtype.itemsize
        tokens, previous, contiguous = 0, 0, True
        for low in range(0, len(self._lengths), _BLOCK):
            lengths = np.asarray(self._lengths[low : low + _BLOCK], dtype=np.int64)
            offsets = np.asarray(self._offsets[low : low + _BLOCK], dtype=np.int64)
            self._refuse(lengths < 0, low, lengths, "length {} is negative")
            self._refuse(offsets % size != 0, low, offsets, f"byte offset {{}} is no multiple of {size}")
            steps = np.diff(offsets, prepend=np.int64(previous))
            self._refuse((steps < 0) | (offsets < 0), low, offsets, "byte offset {} lies before the one ahead of it")
            beyond = (offsets > bin_bytes) | (lengths > (bin_bytes - offsets) // size)
            self._refuse(beyond, low, offsets, f"byte offset {{}} and its length reach past {bin_bytes} bytes of .bin")
            starts = tokens * size + np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]]) * size
            contiguous = contiguous and bool(np.array_equal(starts, offsets))
            tokens += int(lengths.sum())
            previous = int(offsets[-1])
        if contiguous and tokens * size != bin_bytes:
            raise DataError(
                f"{self.bin_path}: holds {bin_bytes} bytes where {self.idx_path.name} accounts for "
                f"{tokens * size}; "
                "the two files do not belong together, or one was cut short"
            )
        if tokens == 0:
            raise DataError(f"{self.idx_path}: its documents hold no tokens")
        return tokens, contiguous

    def _refuse(self, wrong: NDArray[np.bool_], low: int, values: Ints, what: str) -> None:
        if wrong.any():
            at = int(wrong.argmax())
            raise DataError(
                f"{self.idx_path}: sequence {low + at}: {what.format(int(values[at]))}; the file is corrupt"
            )

    def _check_documents(self, sequences: int) -> None:
        ends = self._first_sequence
        if int(ends[0]) != 0 or int(ends[-1]) != sequences:
            raise DataError(
                f"{self.idx_path}: documents span sequences {int(ends[0])} to {int(ends[-1])}, not 0 to "
                f"{sequences}; "
                "the file is corrupt"
            )
        for low in range(0, len(ends) - 1, _BLOCK):
            block = np.asarray(ends[low : low + _BLOCK + 1])
            falling = np.diff(block) < 0
            if falling.any():
                number = low + int(falling.argmax())
                raise DataError(f"{self.idx_path}: document {number} ends before it begins; the file is corrupt")


def _size(path: Path, prefix: str) -> int:
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        hint = ""
        if prefix.endswith((".bin", ".idx")):
            hint = f"; give the prefix without its ending: {prefix[:-4]}"
        raise DataError(f"{path}: there is no such file{hint}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not path.is_file():
        raise DataError(f"{path}: is not a file")
    if size == 0:
        raise DataError(f"{path}: is empty; prepare it again with `ultrascale data prepare`")
    return size


def _read_header(path: Path, size: int) -> tuple[np.dtype[Any], int, int]:
    """(token type, sequences, entries of the document index), checked against the file's size."""
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER.size)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if raw[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: begins with {raw[:9]!r}, not {MAGIC!r}; it is no index of a token file")
    if len(raw) < HEADER.size:
        raise DataError(f"{path}: {size} bytes are less than the header of {HEADER.size}; the file was cut short")
    _, version, code, sequences, document_entries = HEADER.unpack(raw)
    if version != VERSION:
        raise DataError(f"{path}: has version {version}; only version {VERSION} is known")
    if code in FLOAT_CODES:
        raise DataError(f"{path}: says tokens are {FLOAT_CODES[code]}; token ids are integers")
    if code not in DTYPES:
        raise DataError(f"{path}: type code {code} is not one of {', '.join(map(str, DTYPES))}; the file is corrupt")
    expected = HEADER.size + 12 * sequences + 8 * document_entries
    if size == expected + sequences and sequences:
        raise DataError(
            f"{path}: holds a mode per sequence (multimodal data), which is not supported; export text alone"
        )
    if size != expected:
        raise DataError(
            f"{path}: is {size} bytes where {sequences} sequences and {document_entries} document "
            f"entries make {expected}; "
            "the file was cut short or is corrupt"
        )
    if document_entries < 2 or sequences == 0:
        raise DataError(f"{path}: lists no documents")
    return np.dtype(DTYPES[code]), sequences, document_entries


def _view(index: NDArray[np.uint8], dtype: str, start: int, count: int) -> NDArray[Any]:
    return index[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def _fingerprint(index: NDArray[np.uint8], path: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(index), 1 << 24):
        digest.update(index[start : start + (1 << 24)].data)
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        last = max(0, size - _PROBE_BYTES)
        for probe in range(_PROBES):
            file.seek(last * probe // (_PROBES - 1))
            digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()
