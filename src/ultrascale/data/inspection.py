"""Looking at token files: what `ultrascale data info` and `data pack` print and `ultrascale data check` proves."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale.data.bin_index import beside, build
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.loader import SCANNED_TOKENS, current_metadata
from ultrascale.data.metadata import Metadata, metadata_path, read_metadata, to_json
from ultrascale.data.packing import OnPieces
from ultrascale.data.samples import out_of_range

_BLOCK = 1 << 20  # tokens, and bytes, read in one go

OnTokens = Callable[[int, int], None]  # (tokens done, of how many)


@dataclass(frozen=True)
class Checked:
    """What a full check of one prefix found; `problems` is empty when it is whole."""

    prefix: str
    documents: int
    tokens: int
    problems: tuple[str, ...]
    recorded: bool = False


def describe(prefix: str | Path) -> dict[str, Any]:
    """Documents, tokens, dtype, largest id, mean length and tokenizer of a prefix, as JSON. Raises DataError.

    `max_id` comes from the sidecar; without one it is looked for in files of up to 64 Mi tokens, and null
    beyond.
    """
    dataset = IndexedDataset(prefix)
    metadata = current_metadata(dataset)
    max_id: int | None = None
    if metadata is not None:
        max_id = metadata.max_id
    elif dataset.tokens <= SCANNED_TOKENS:
        max_id = dataset.scan().max_id
    return {
        "prefix": str(prefix),
        "documents": dataset.documents,
        "tokens": dataset.tokens,
        "dtype": dataset.dtype.name,
        "max_id": max_id,
        "mean_length": dataset.tokens / dataset.documents,
        "bytes": dataset.bin_path.stat().st_size,
        "tokenizer": metadata.tokenizer if metadata else None,
        "vocab_size": metadata.vocab_size if metadata else None,
        "end_of_document": metadata.end_of_document if metadata else None,
        "fingerprint": dataset.fingerprint,
    }


def check_prefix(
    prefix: str | Path, vocab_size: int | None = None, record: bool = False, on_tokens: OnTokens | None = None
) -> Checked:
    """Reads everything there is: the index, every token, the checksums of the sidecar.

    vocab_size   limit of the token ids; default: what the sidecar says
    record       writes a sidecar for files that have none, or accepts files that changed since; not when the
                 files
                 have a problem of their own

    Raises DataError when the files cannot be opened as token files at all.
    """
    dataset = IndexedDataset(prefix)
    problems: list[str] = []
    metadata: Metadata | None = None
    try:
        metadata = current_metadata(dataset)
    except DataError as error:
        if not record:
            problems.append(str(error))
    found = _scan(dataset, metadata, vocab_size, on_tokens)
    problems += found.problems
    checksums = (_sha256(dataset.bin_path), _sha256(dataset.idx_path))
    if metadata is not None and not record:
        for path, before, now in (
            (dataset.bin_path, metadata.bin_sha256, checksums[0]),
            (dataset.idx_path, metadata.idx_sha256, checksums[1]),
        ):
            if before != now:
                problems.append(
                    f"{path}: its SHA-256 is {now[:16]}…, recorded was {before[:16]}…; the file changed or is damaged"
                )
    recorded = record and not problems
    if recorded:
        _record(dataset, metadata, found, checksums)
    return Checked(str(prefix), dataset.documents, dataset.tokens, tuple(problems), recorded)


@dataclass(frozen=True)
class Packed:
    """What `pack` wrote.

    padding_share     share of the tokens of all bins that only fill them up
    longest_document  in tokens
    """

    prefix: str
    path: str
    sequence_length: int
    documents: int
    longest_document: int
    tokens: int
    bins: int
    padding_share: float


def pack(
    prefix: str | Path, sequence_length: int, cut_documents: bool = False, on_pieces: OnPieces | None = None
) -> Packed:
    """Writes the index of packed documents beside a prefix, in place of one that is there. Raises DataError when a
    document is too long and not to be cut, or the folder cannot be written.
    """
    if sequence_length < 1:
        raise DataError(f"--sequence-length {sequence_length} is not at least 1")
    dataset = IndexedDataset(prefix)
    path = beside(prefix, sequence_length, cut_documents)
    try:
        index = build(dataset, sequence_length, cut_documents, path, on_pieces)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    return Packed(
        str(prefix),
        str(path),
        sequence_length,
        index.documents,
        index.longest_document,
        index.tokens,
        index.bins,
        index.padding_share,
    )


@dataclass(frozen=True)
class _Scan:
    max_id: int
    max_id_at: int
    problems: tuple[str, ...]


def _scan(
    dataset: IndexedDataset, metadata: Metadata | None, vocab_size: int | None, on_tokens: OnTokens | None
) -> _Scan:
    """One pass over all tokens: range of the ids, and the end of each document."""
    limit = vocab_size if vocab_size is not None else metadata.vocab_size if metadata else None
    end = metadata.end_of_document if metadata else None
    max_id, max_id_at, ends = -1, -1, 0
    problems: list[str] = []
    for start in range(0, dataset.tokens, _BLOCK):
        block = dataset.read(start, min(_BLOCK, dataset.tokens - start))
        at = int(block.argmax())
        if int(block[at]) > max_id:
            max_id, max_id_at = int(block[at]), start + at
        wrong = (block < 0) if limit is None else (block < 0) | (block >= limit)
        if wrong.any() and not problems:
            first = int(wrong.argmax())
            if limit is None:
                problems.append(f"{dataset.bin_path}: token {start + first} has the negative id {int(block[first])}")
            else:
                problems.append(out_of_range(dataset, int(block[first]), start + first, limit))
        if end is not None:
            ends += int((block == end).sum())
        if on_tokens is not None:
            on_tokens(start + len(block), dataset.tokens)
    if metadata is not None and metadata.max_id != max_id and not problems:
        problems.append(
            f"{dataset.bin_path}: its largest id is {max_id}, recorded was {metadata.max_id}; "
            "the file changed or is damaged"
        )
    if end is not None:
        problems += _wrong_ends(dataset, end, ends)
    return _Scan(max_id, max_id_at, tuple(problems))


def _wrong_ends(dataset: IndexedDataset, end: int, ends: int) -> list[str]:
    document = position = 0
    for lengths in dataset.document_lengths():
        past = position + np.cumsum(lengths)
        # An empty document has no last token; the one before it does not count for it.
        wrong = (lengths == 0) | (dataset.at(np.maximum(past - 1, 0)) != end)
        if wrong.any():
            number = document + int(wrong.argmax())
            return [f"{dataset.bin_path}: document {number} does not end with {end}, the end of a document"]
        document, position = document + len(lengths), int(past[-1])
    if ends != dataset.documents:
        return [f"{dataset.bin_path}: {ends} ends of documents (id {end}) in {dataset.documents} documents"]
    return []


def _record(dataset: IndexedDataset, metadata: Metadata | None, found: _Scan, checksums: tuple[str, str]) -> None:
    known = metadata
    if known is None:
        # What the files were made with stays known as long as the sidecar can be read at all.
        with contextlib.suppress(DataError):
            known = read_metadata(dataset.prefix)
    facts = Metadata(
        documents=dataset.documents,
        tokens=dataset.tokens,
        max_id=found.max_id,
        max_id_at=found.max_id_at,
        fingerprint=dataset.fingerprint,
        bin_sha256=checksums[0],
        idx_sha256=checksums[1],
    )
    if known is not None:
        facts = replace(
            facts,
            tokenizer=known.tokenizer,
            tokenizer_fingerprint=known.tokenizer_fingerprint,
            vocab_size=known.vocab_size,
            end_of_document=known.end_of_document,
        )
    path = metadata_path(dataset.prefix)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(to_json(facts), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
