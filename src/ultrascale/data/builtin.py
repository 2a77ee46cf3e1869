"""Data that needs no files: `builtin:stdlib`, real text that every Python has, and `builtin:uneven`, "
"for proofs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.cache import CACHE_VARIABLE, cache_folder, locked
from ultrascale.data.corpus import STDLIB, InputFile, stdlib_files
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.permutation import KeyedPermutation, derive_key, stream64
from ultrascale.data.prepare import VALIDATION_SUFFIX, prepare_files
from ultrascale.data.samples import Sample
from ultrascale.data.tokenizer import Tokenizer
from ultrascale.data.writer import sync_folder

Ints = NDArray[np.int64]

UNEVEN = "builtin:uneven"
BUILTINS = (STDLIB, UNEVEN)
STDLIB_VALIDATION_FRACTION = 0.02
_CACHE_FORMAT = 1  # raised when the files made from the same text would differ


def stdlib_prefix(tokenizer: Tokenizer, validation: bool) -> Path:
    """Prefix of the tokens of this Python's standard library, made on first use; `validation` for its
    held-out side.

    Every document is a .py file; 2% are held out by document hash. The files lie in a folder of the cache
    named by Python's version, the sources' names, sizes and times, and the tokenizer. Any number of processes
    may ask at once: one builds under a lock, into a temporary folder that is renamed when whole.

    Raises DataError when the cache cannot be written.
    """
    files = stdlib_files()
    folder = cache_folder() / f"stdlib-{_stdlib_key(files, tokenizer)}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f"{folder.name}.lock")):
                if not folder.is_dir():
                    _build(files, tokenizer, folder)
        except OSError as error:
            raise DataError(
                f"{folder.parent}: the cache for {STDLIB} cannot be written ({error.strerror}); "
                f"set {CACHE_VARIABLE} to a folder that can"
            ) from error
    return folder / f"tokens{VALIDATION_SUFFIX if validation else ''}"


def open_stdlib(tokenizer: Tokenizer, validation: bool) -> IndexedDataset:
    """The token file of `stdlib_prefix`. Raises DataError, with what to remove, when the cached files are
    damaged.
    """
    prefix = stdlib_prefix(tokenizer, validation)
    try:
        return IndexedDataset(prefix)
    except DataError as error:
        raise DataError(f"{error}; remove {prefix.parent}, and it is built again") from error


class Uneven:
    """Synthetic samples with uneven targets, a function of (seed, side, k) alone; for parity tests.

    Token ids are uniform over the vocabulary. Within each global batch of G > 1 samples, one sample (another
    one each time) has no target at all, and the others have different numbers of them, from about S/G to
    S·(G−1)/G, at random places. Nothing depends on how the batch is cut, so a rank or a micro-batch can come
    out without any target.

    With `documents`, a sample is cut into documents of random, uneven lengths: some of one token, some samples a single
    one. Every sample that has targets keeps one that lies within a document.
    """

    def __init__(
        self,
        vocab_size: int,
        seed: int,
        global_size: int,
        sequence_length: int,
        lookahead: int = 1,
        side: str = "train",
        documents: bool = False,
    ) -> None:
        self.name = UNEVEN
        self.vocab_size, self.seed, self.side = vocab_size, seed, side
        self.global_size, self.sequence_length, self.lookahead = global_size, sequence_length, lookahead
        self.documents = documents

    def read(self, number: int) -> Sample:
        """Sample `number` of the run, from 0."""
        width = self.sequence_length + self.lookahead
        counters = np.arange(width, dtype=np.uint64)
        words = stream64(derive_key("uneven tokens", self.seed, self.side, number), counters)
        tokens = (words % np.uint64(self.vocab_size)).astype(np.int64)
        places = stream64(derive_key("uneven targets", self.seed, self.side, number), counters)
        count = self.targets(number)
        live = np.zeros(width, np.bool_)
        # Token 0 is never a target; tokens 1 … S are the targets of depth 1, those behind belong to deeper
        # ones.
        first_depth = places[1 : self.sequence_length + 1]
        live[1 : self.sequence_length + 1][np.argsort(first_depth, kind="stable")[:count]] = True
        if count:
            live[self.sequence_length + 1 :] = places[self.sequence_length + 1 :] % np.uint64(2) == 1
        return Sample(tokens, live, self._starts(number, live) if self.documents else None)

    def targets(self, number: int) -> int:
        """How many targets (of depth 1) sample `number` has."""
        if self.global_size == 1:
            return max(1, self.sequence_length // 2)  # a step must have a target
        batch, slot = divmod(number, self.global_size)
        key = derive_key("uneven counts", self.seed, self.side, batch)
        level = int(KeyedPermutation(self.global_size, key)(np.array([slot], np.int64))[0])
        return max(1, level * self.sequence_length // self.global_size) if level else 0

    def _starts(self, number: int, live: NDArray[np.bool_]) -> Ints:
        """Where the documents of a sample begin: at random, one in about 2, 4 or S/2 tokens, or none but the first.

        Which of these is drawn for the sample. Its first target never begins a document, where it would be no target
        any more: so no step loses all of its targets.
        """
        key = derive_key("uneven documents", self.seed, self.side, number)
        words = stream64(key, np.arange(len(live), dtype=np.uint64))
        kind = int(words[0] % np.uint64(4))
        if kind == 3:
            return np.zeros(1, np.int64)
        begins = words % np.uint64((2, 4, max(2, self.sequence_length // 2))[kind]) == 0
        begins[int(live.argmax())] = False
        begins[0] = True
        return np.flatnonzero(begins)


def _stdlib_key(files: list[InputFile], tokenizer: Tokenizer) -> str:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{_CACHE_FORMAT}|{sys.version}|{tokenizer.fingerprint}|{tokenizer.end_of_document}".encode())
    for file in files:
        digest.update(f"{file.path}|{file.size}|{file.path.stat().st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    return f"{version}-{digest.hexdigest()}"


def _build(files: list[InputFile], tokenizer: Tokenizer, folder: Path) -> None:
    # Not tempfile.mkdtemp, whose folders only their owner may read: a cache may be shared.
    temporary = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(6)}")
    temporary.mkdir()
    try:
        prepare_files(files, temporary / "tokens", tokenizer.name, STDLIB_VALIDATION_FRACTION)
        # A folder already there was made by a host that does not share our lock; it holds the same.
        with contextlib.suppress(FileExistsError):
            _rename_to_new(temporary, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename_to_new(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        if target.is_dir():
            raise FileExistsError(target) from error
        raise
