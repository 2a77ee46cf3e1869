"""Data that needs no files: `builtin:stdlib`, real text that every Python has, and `builtin:uneven`, "
"for proofs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
CACHE_VARIABLE = "ULTRASCALE_CACHE"
STDLIB_VALIDATION_FRACTION = 0.02
_CACHE_FORMAT = 1  # raised when the files made from the same text would differ


def cache_folder() -> Path:
    """$ULTRASCALE_CACHE, else ~/.cache/ultrascale."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "ultrascale"


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
            with _locked(folder.with_name(f"{folder.name}.lock")):
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
    """

    def __init__(
        self,
        vocab_size: int,
        seed: int,
        global_size: int,
        sequence_length: int,
        lookahead: int = 1,
        side: str = "train",
    ) -> None:
        self.name = UNEVEN
        self.vocab_size, self.seed, self.side = vocab_size, seed, side
        self.global_size, self.sequence_length, self.lookahead = global_size, sequence_length, lookahead

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
        return Sample(tokens, live)

    def targets(self, number: int) -> int:
        """How many targets (of depth 1) sample `number` has."""
        if self.global_size == 1:
            return max(1, self.sequence_length // 2)  # a step must have a target
        batch, slot = divmod(number, self.global_size)
        key = derive_key("uneven counts", self.seed, self.side, batch)
        level = int(KeyedPermutation(self.global_size, key)(np.array([slot], np.int64))[0])
        return max(1, level * self.sequence_length // self.global_size) if level else 0


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


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; without one where the file system has none, as the rename alone keeps the
    cache right.
    """
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
