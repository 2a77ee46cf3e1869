"""The index of a packed dataset: which pieces of which documents share a sequence, in a file that is mapped.

`ultrascale data pack` writes it beside the tokens, as PREFIX.packed-N (PREFIX.packed-N-cut where long documents are
cut). Where it is not there, a run builds it in the cache, once per host: it follows from the tokens' index, the
sequence length and the rule for long documents alone, and so does everything that is read through it.

The file, little-endian:

    bytes   type            what
    0       17 bytes        magic "ultrascale.bins", two zero bytes
    17      u8              format = 1
    18      u8              1 when long documents are cut
    19      5 bytes         zero
    24      u64[6]          sequence length, documents, tokens of the longest, tokens of all, bins, pieces
    72      32 bytes        fingerprint of the token file, hexadecimal
    104     16 bytes        BLAKE2b of all the rest but these 16 bytes
    120     i64[bins + 1]   first piece of each bin; begins with 0, ends with the number of pieces
            i64[pieces]     first token of each piece in the stream of documents
            i32[pieces]     tokens of each piece
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.cache import CACHE_VARIABLE, cache_folder, locked
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.packing import OnPieces, best_fit, cut
from ultrascale.data.writer import sync_folder

Ints = NDArray[np.int64]

PACKING_VERSION = 1
"""Raised when the same documents would be packed otherwise, or written otherwise."""

_MAGIC = b"ultrascale.bins\x00\x00"
_HEADER = struct.Struct("<17sBB5x6Q32s16s")
_CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class BinIndex:
    """An open index: where the pieces of each bin lie in the stream of documents."""

    path: Path
    sequence_length: int
    cut_documents: bool
    documents: int
    longest_document: int
    """In tokens."""
    tokens: int
    bins: int
    pieces: int
    fingerprint: str
    _first_piece: NDArray[Any]
    _starts: NDArray[Any]
    _lengths: NDArray[Any]

    @property
    def padding_share(self) -> float:
        """Share of the tokens of all bins that only fill them up."""
        return 1 - self.tokens / (self.bins * self.sequence_length)

    def pieces_of(self, number: int) -> list[tuple[int, int]]:
        """(first token in the stream, tokens) of each piece of bin `number`, in the order of the documents."""
        first, end = int(self._first_piece[number]), int(self._first_piece[number + 1])
        return list(zip(self._starts[first:end].tolist(), self._lengths[first:end].tolist()))


def beside(prefix: str | Path, sequence_length: int, cut_documents: bool) -> Path:
    """Where `ultrascale data pack` writes the index of a prefix."""
    return Path(f"{prefix}.packed-{sequence_length}{'-cut' if cut_documents else ''}")


def find_or_build(dataset: IndexedDataset, sequence_length: int, cut_documents: bool) -> BinIndex:
    """The index beside the tokens, or that of the cache, which is built when it is not there: under a lock, so that
    one process of a host does it.

    Raises DataError when a document is too long, an index is damaged or of other tokens, or the cache cannot be
    written.
    """
    ending = "-cut" if cut_documents else ""
    path = beside(dataset.prefix, sequence_length, cut_documents)
    if path.exists():
        option = " --cut-documents" if cut_documents else ""
        command = f"ultrascale data pack {dataset.prefix} --sequence-length {sequence_length}{option}"
        return _open(path, dataset, sequence_length, cut_documents, f"build it again with `{command}`")
    name = f"packed-{dataset.fingerprint}-{sequence_length}{ending}-v{PACKING_VERSION}"
    path = cache_folder() / name
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_name(f"{name}.lock")):
                if not path.exists():
                    build(dataset, sequence_length, cut_documents, path)
    except OSError as error:
        raise DataError(
            f"{path.parent}: the cache for the packing of {dataset.prefix} cannot be written ({error.strerror}); set "
            f"{CACHE_VARIABLE} to a folder that can, or build it with `ultrascale data pack`"
        ) from error
    return _open(path, dataset, sequence_length, cut_documents, "remove it, and it is built again")


def build(
    dataset: IndexedDataset,
    sequence_length: int,
    cut_documents: bool,
    path: Path,
    on_pieces: OnPieces | None = None,
) -> BinIndex:
    """Packs the documents and writes the index to `path`, under another name until it is whole.

    Takes about 200 bytes of memory a document while it runs. Raises DataError when a document is longer than
    `sequence_length` and not to be cut, OSError when the file cannot be written.
    """
    lengths = np.concatenate(list(dataset.document_lengths()))
    longest = int(lengths.max())
    if longest > sequence_length and not cut_documents:
        raise DataError(_too_long(dataset, lengths, sequence_length))
    documents = len(lengths)
    starts, lengths = cut(np.cumsum(lengths) - lengths, lengths, sequence_length)
    bin_of_piece = best_fit(lengths, sequence_length, on_pieces)
    order = np.argsort(bin_of_piece, kind="stable")  # within a bin, documents follow each other as in the file
    first_piece = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(bin_of_piece))])
    counts = (sequence_length, documents, longest, dataset.tokens, len(first_piece) - 1, len(order))
    arrays = [first_piece.astype("<i8"), starts[order].astype("<i8"), lengths[order].astype("<i4")]
    _write(path, (int(cut_documents), *counts, dataset.fingerprint.encode("ascii")), arrays)
    return _open(path, dataset, sequence_length, cut_documents, "remove it, and build it again")


def _too_long(dataset: IndexedDataset, lengths: Ints, sequence_length: int) -> str:
    long = np.flatnonzero(lengths > sequence_length)
    number = int(long[0])
    others = ""
    if len(long) > 1:
        others = f", and {len(long) - 1} more are too long, the longest of {int(lengths.max())} tokens"
    return (
        f"{dataset.bin_path}: document {number} has {int(lengths[number])} tokens, which data.packing=best_fit cannot "
        f"put into batch.sequence_length={sequence_length}{others}; set batch.sequence_length to at least "
        f"{int(lengths.max())}, or data.cut_documents=true to cut them into pieces"
    )


def _write(path: Path, fields: tuple[Any, ...], arrays: list[NDArray[Any]]) -> None:
    head = _HEADER.pack(_MAGIC, PACKING_VERSION, *fields, bytes(_CHECKSUM_BYTES))
    digest = hashlib.blake2b(head[:-_CHECKSUM_BYTES], digest_size=_CHECKSUM_BYTES)
    for array in arrays:
        digest.update(array.data)
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
    try:
        with temporary.open("xb") as file:
            file.write(head[:-_CHECKSUM_BYTES] + digest.digest())
            for array in arrays:
                file.write(array.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _open(path: Path, dataset: IndexedDataset, sequence_length: int, cut_documents: bool, remedy: str) -> BinIndex:
    """Raises DataError, with `remedy`, when the file is not whole or not the one that is meant."""
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {remedy}") from error
    if len(raw) < _HEADER.size or raw[: len(_MAGIC)].tobytes() != _MAGIC:
        raise DataError(f"{path}: is no index of packed documents; {remedy}")
    head = raw[: _HEADER.size].tobytes()
    _, version, was_cut, length, documents, longest, tokens, bins, pieces, fingerprint, checksum = _HEADER.unpack(head)
    if version != PACKING_VERSION:
        raise DataError(f"{path}: has format {version}, and {PACKING_VERSION} is used now; {remedy}")
    expected = _HEADER.size + 8 * (bins + 1) + 12 * pieces
    if len(raw) != expected:
        raise DataError(f"{path}: is {len(raw)} bytes where {bins} bins of {pieces} pieces make {expected}; {remedy}")
    digest = hashlib.blake2b(head[:-_CHECKSUM_BYTES], digest_size=_CHECKSUM_BYTES)
    for start in range(_HEADER.size, len(raw), 1 << 24):
        digest.update(raw[start : start + (1 << 24)].data)
    if digest.digest() != checksum:
        raise DataError(f"{path}: does not have its checksum; it is damaged; {remedy}")
    found = (fingerprint.decode("ascii"), length, bool(was_cut))
    if found != (dataset.fingerprint, sequence_length, cut_documents):
        raise DataError(f"{path}: was built for other tokens than {dataset.bin_path.name} holds now; {remedy}")
    starts_at = _HEADER.size + 8 * (bins + 1)
    return BinIndex(
        path=path,
        sequence_length=length,
        cut_documents=cut_documents,
        documents=documents,
        longest_document=longest,
        tokens=tokens,
        bins=bins,
        pieces=pieces,
        fingerprint=found[0],
        _first_piece=raw[_HEADER.size : starts_at].view("<i8"),
        _starts=raw[starts_at : starts_at + 8 * pieces].view("<i8"),
        _lengths=raw[starts_at + 8 * pieces :].view("<i4"),
    )
