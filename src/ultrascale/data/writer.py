"""Writing token files: in bounded memory, under temporary names until everything is there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.errors import DataError
from ultrascale.data.indexed import CODES, HEADER, MAGIC, VERSION, IndexedDataset, bin_path, idx_path
from ultrascale.data.metadata import Metadata, metadata_path, to_json

Ints = NDArray[np.int64]

LONGEST_SEQUENCE = 2**31 - 1  # a sequence's length is stored as int32
_BLOCK = 1 << 20


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """The token type that readers of this layout expect: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedWriter:
    """Writes documents one after the other into PREFIX.bin, PREFIX.idx and PREFIX.meta.json.

    Everything goes to temporary names in the same folder. `seal` completes and syncs them, `publish` gives
    them their names, the index last; until then files already at PREFIX stand. `abandon` removes them, as
    does leaving a `with` block without `publish`. Documents of more than 2³¹ − 1 tokens become several
    sequences.

    Raises DataError for a folder that cannot be written and for ids outside [0, vocab_size).
    """

    def __init__(self, prefix: str | Path, vocab_size: int, longest_sequence: int = LONGEST_SEQUENCE) -> None:
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.longest_sequence = longest_sequence
        self.dtype = smallest_dtype(vocab_size)
        self.documents = self.tokens = self._sequences = 0
        self.max_id = self.max_id_at = -1
        self._temporary = self.prefix.parent / f".{self.prefix.name}.tmp-{secrets.token_hex(6)}"
        self._hash = hashlib.sha256()
        self._sealed = False
        self._open: list[IO[bytes]] = []
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin = self._start(".bin")
            # Spooled, as a corpus may have more documents than memory has room for.
            self._lengths = self._start(".lengths")
            self._ends = self._start(".ends")
        except OSError as error:
            self.abandon()
            raise DataError(f"{self.prefix.parent}: cannot be written ({error.strerror})") from error

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()

    def append(self, tokens: Ints) -> None:
        """One document [n]."""
        self.append_many(tokens, np.array([len(tokens)], np.int64))

    def append_many(self, tokens: Ints, lengths: Ints) -> None:
        """Documents that lie one behind the other in `tokens`; lengths [documents] sum to its size."""
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"lengths sum to {int(lengths.sum())} where there are {len(tokens)} tokens")
        if len(tokens):
            low, high_at = int(tokens.min()), int(tokens.argmax())
            high = int(tokens[high_at])
            if low < 0 or high >= self.vocab_size:
                wrong = low if low < 0 else high
                raise DataError(f"{self.prefix}: token id {wrong} is outside [0, {self.vocab_size}) of its tokenizer")
            if high > self.max_id:
                self.max_id, self.max_id_at = high, self.tokens + high_at
        raw = tokens.astype(self.dtype).tobytes()
        self._hash.update(raw)
        self._bin.write(raw)
        sequences, ends = self._cut(lengths)
        self._lengths.write(sequences.astype("<i4").tobytes())
        self._ends.write((self._sequences + ends).astype("<i8").tobytes())
        self._sequences += len(sequences)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def _cut(self, lengths: Ints) -> tuple[Ints, Ints]:
        """(length of each sequence, sequences up to the end of each document)."""
        if lengths.size == 0 or int(lengths.max()) <= self.longest_sequence:
            return lengths, np.arange(1, len(lengths) + 1, dtype=np.int64)
        counts = np.maximum(1, -(-lengths // self.longest_sequence))
        ends = np.cumsum(counts)
        sequences = np.full(int(ends[-1]), self.longest_sequence, np.int64)
        sequences[ends - 1] = lengths - (counts - 1) * self.longest_sequence
        return sequences, ends

    def seal(
        self,
        tokenizer: str | None = None,
        tokenizer_fingerprint: str | None = None,
        end_of_document: int | None = None,
    ) -> Metadata:
        """Completes and syncs the temporary files, reads them back once and returns what is recorded of
        them.
        """
        if self.tokens == 0:
            raise DataError(f"{self.prefix}: there is no document to write")
        self._close(sync=True)
        index = self._path(".idx")
        digest = hashlib.sha256()
        with index.open("wb") as file:
            for block in self._index_blocks():
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        for ending in (".lengths", ".ends"):
            self._path(ending).unlink()
        written = IndexedDataset(self._temporary)
        metadata = Metadata(
            documents=written.documents,
            tokens=written.tokens,
            max_id=self.max_id,
            max_id_at=self.max_id_at,
            fingerprint=written.fingerprint,
            bin_sha256=self._hash.hexdigest(),
            idx_sha256=digest.hexdigest(),
            tokenizer=tokenizer,
            tokenizer_fingerprint=tokenizer_fingerprint,
            vocab_size=self.vocab_size,
            end_of_document=end_of_document,
        )
        with self._path(".meta.json").open("w", encoding="utf-8") as text:
            text.write(to_json(metadata))
            text.flush()
            os.fsync(text.fileno())
        self._sealed = True
        return metadata

    def publish(self) -> None:
        """Gives the sealed files their names. A reader in between sees no index, never a wrong one."""
        if not self._sealed:
            raise RuntimeError("publish() before seal()")
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._path(".bin"), bin_path(self.prefix))
        os.replace(self._path(".meta.json"), metadata_path(self.prefix))
        os.replace(self._path(".idx"), idx_path(self.prefix))
        sync_folder(self.prefix.parent)

    def abandon(self) -> None:
        """Removes what is still under temporary names."""
        self._close(sync=False)
        for ending in (".bin", ".idx", ".meta.json", ".lengths", ".ends"):
            self._path(ending).unlink(missing_ok=True)

    def _index_blocks(self) -> Iterator[bytes]:
        yield HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self._sequences, self.documents + 1)
        yield from _blocks(self._path(".lengths"))
        offset = 0
        for raw in _blocks(self._path(".lengths")):
            ends = offset + np.cumsum(np.frombuffer(raw, "<i4"), dtype=np.int64) * self.dtype.itemsize
            yield np.concatenate([[offset], ends[:-1]]).astype("<i8").tobytes()
            offset = int(ends[-1])
        yield np.zeros(1, "<i8").tobytes()
        yield from _blocks(self._path(".ends"))

    def _start(self, ending: str) -> IO[bytes]:
        file = self._path(ending).open("xb")
        self._open.append(file)
        return file

    def _path(self, ending: str) -> Path:
        return Path(f"{self._temporary}{ending}")

    def _close(self, sync: bool) -> None:
        for file in self._open:
            if sync:
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(OSError):  # a full disk shows again when a buffer is flushed on close
                file.close()
        self._open = []


def remove_published(prefix: str | Path) -> None:
    """Removes the files of a prefix, the index first, so that what is left is never taken for whole."""
    for path in (idx_path(prefix), metadata_path(prefix), bin_path(prefix)):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(8 * _BLOCK):
            yield block
