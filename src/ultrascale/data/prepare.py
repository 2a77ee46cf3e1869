"""From text to token files: `ultrascale data prepare`.

Documents are tokenised by worker processes and written by this one, in the order of the corpus: the files are
the same byte for byte whatever the number of workers. Memory is bounded by a few pieces (see corpus.py) a
worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.corpus import InputFile, Piece, find_files, pieces, read_text
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import bin_path, idx_path
from ultrascale.data.metadata import Metadata, metadata_path
from ultrascale.data.tokenizer import Tokenizer, open_tokenizer, train_bpe
from ultrascale.data.writer import IndexedWriter, remove_published, smallest_dtype, sync_folder

Ints = NDArray[np.int64]

VALIDATION_SUFFIX = ".validation"
TOKENIZER_TRAINING_BYTES = 1 << 28  # text that a new vocabulary is learned from, at most


@dataclass
class Progress:
    """Where a run of `prepare` is. phase is `tokenizer` (a vocabulary is being trained) or `tokens`."""

    phase: str
    bytes_done: int
    bytes_total: int
    documents: int


OnProgress = Callable[[Progress], None]


@dataclass
class Prepared:
    """What `prepare` wrote.

    train, validation   what was recorded of each file; validation is None when no document was held out
    empty, not_text     documents left out: without text, and files of a folder that are not UTF-8 text
    """

    prefix: str
    train: Metadata
    validation: Metadata | None
    tokenizer: str
    empty: int = 0
    not_text: int = 0
    input_bytes: int = 0
    seconds: float = 0.0


@dataclass
class _Tokenised:
    """A piece's documents, side by side: `tokens` of held-out and other documents lie apart, each in
    order.
    """

    tokens: dict[bool, NDArray[np.generic]]
    lengths: dict[bool, Ints]
    empty: int
    not_text: int
    input_bytes: int


@dataclass
class _Split:
    """The two files being written."""

    train: IndexedWriter
    validation: IndexedWriter
    empty: int = 0
    not_text: int = 0
    input_bytes: int = 0
    sealed: dict[bool, Metadata] = field(default_factory=dict)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to validation: its BLAKE2b-64, as a fraction of 2^64, is below `fraction`.

    The same text falls on the same side in every corpus, so no copy of a validation document is trained on.
    """
    return _hash_is_below(text, fraction, b"ultrascale.split")


def _hash_is_below(text: str, fraction: float, purpose: bytes) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") < int(fraction * 2**64)


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str = "bytes",
    workers: int | None = None,
    validation_fraction: float = 0.0,
    *,
    end_of_document: str | None = None,
    text_field: str = "text",
    separator: str | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Prepared:
    """Writes the documents of `inputs` to OUTPUT.bin/.idx, and those held out to OUTPUT.validation.bin/.idx.

    tokenizer            bytes, the path of a tokenizer.json, or train:VOCAB: a byte-level BPE
                         learned from the inputs and saved as tokenizer.json in the folder of OUTPUT
    workers              processes; None is one a core. They change how long it takes, nothing else
    validation_fraction  share of documents held out by document hash, in [0, 1)
    text_field           field of a JSON line that holds the text
    separator            what stands between the documents of a text file that is named (not met in a folder)

    Raises DataError: bad input is named by file or file:line, and existing output is refused unless
    `overwrite`.
    """
    started = time.monotonic()
    workers = _check_arguments(workers, validation_fraction)
    output = Path(output)
    files = find_files(inputs)
    trained = _vocabulary_to_train(tokenizer)
    targets = [*_paths(output), *_paths(f"{output}{VALIDATION_SUFFIX}")]
    new_tokenizer = output.parent / "tokenizer.json" if trained is not None else None
    if not overwrite:
        _refuse_existing([*targets, *([new_tokenizer] if new_tokenizer else [])])
    cut = partial(pieces, files, text_field, separator)
    with contextlib.ExitStack() as cleanup:
        tokenizer_file: Path | None = None
        if trained is not None:
            tokenizer_file = _folder(output) / f".tokenizer.tmp-{os.getpid()}.json"
            cleanup.callback(tokenizer_file.unlink, missing_ok=True)
            train_bpe(_training_texts(cut(), files, validation_fraction, on_progress), trained, tokenizer_file)
        opened = open_tokenizer(str(tokenizer_file or tokenizer), end_of_document)
        name = str(new_tokenizer or tokenizer)
        split = _write(cut(), files, opened, output, workers, validation_fraction, name, on_progress, cleanup)
        if tokenizer_file is not None and new_tokenizer is not None:
            os.replace(tokenizer_file, new_tokenizer)
        # First of all: what an earlier corpus held out is not held out from this one.
        remove_published(split.validation.prefix)
        split.train.publish()
        if True in split.sealed:
            split.validation.publish()
        sync_folder(output.parent)
    return Prepared(
        prefix=str(output),
        train=split.sealed[False],
        validation=split.sealed.get(True),
        tokenizer=name,
        empty=split.empty,
        not_text=split.not_text,
        input_bytes=split.input_bytes,
        seconds=time.monotonic() - started,
    )


def prepare_files(files: Sequence[InputFile], output: Path, tokenizer: str, validation_fraction: float) -> Prepared:
    """`prepare` for files already found, in this process, without a bar; for corpora that this package makes
    itself.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as cleanup:
        opened = open_tokenizer(tokenizer)
        split = _write(pieces(files), files, opened, output, 1, validation_fraction, tokenizer, None, cleanup)
        split.train.publish()
        if True in split.sealed:
            split.validation.publish()
    seconds = time.monotonic() - started
    return Prepared(str(output), split.sealed[False], split.sealed.get(True), tokenizer, seconds=seconds)


def _write(
    work: Iterator[Piece],
    files: Sequence[InputFile],
    tokenizer: Tokenizer,
    output: Path,
    workers: int,
    validation_fraction: float,
    tokenizer_name: str,
    on_progress: OnProgress | None,
    cleanup: contextlib.ExitStack,
) -> _Split:
    """Tokenises everything into two sealed, not yet published, writers."""
    total = sum(file.size for file in files)
    split = _Split(
        train=cleanup.enter_context(IndexedWriter(output, tokenizer.vocab_size)),
        validation=cleanup.enter_context(IndexedWriter(f"{output}{VALIDATION_SUFFIX}", tokenizer.vocab_size)),
    )
    try:
        for done in _tokenise_all(work, tokenizer, validation_fraction, workers):
            for held_out, writer in ((False, split.train), (True, split.validation)):
                writer.append_many(done.tokens[held_out].astype(np.int64), done.lengths[held_out])
            split.empty += done.empty
            split.not_text += done.not_text
            split.input_bytes += done.input_bytes
            if on_progress is not None:
                documents = split.train.documents + split.validation.documents
                on_progress(Progress("tokens", split.input_bytes, total, documents))
        if split.train.documents == 0:
            raise DataError(_why_nothing_is_left(output, split, validation_fraction))
        for held_out, writer in ((False, split.train), (True, split.validation)):
            if writer.documents:
                split.sealed[held_out] = writer.seal(tokenizer_name, tokenizer.fingerprint, tokenizer.end_of_document)
    except OSError as error:
        raise DataError(f"{output}: cannot be written ({error.strerror})") from error
    return split


def _tokenise_all(
    work: Iterator[Piece], tokenizer: Tokenizer, validation_fraction: float, workers: int
) -> Iterator[_Tokenised]:
    """Results in the order of `work`, at most three pieces a worker ahead of the one who takes them."""
    if workers == 1:
        for piece in work:
            yield _tokenise(piece, tokenizer, validation_fraction)
        return
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer, validation_fraction),
    )
    waiting: deque[Future[_Tokenised]] = deque()
    try:
        for piece in work:
            waiting.append(pool.submit(_tokenise_here, piece))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process died, most often for want of memory; use fewer than --workers {workers}"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, float] | None = None


def _start_worker(tokenizer: Tokenizer, validation_fraction: float) -> None:
    # The processes share the cores already; threads of the library on top would fight for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _worker  # one tokenizer a process, not one a piece
    _worker = tokenizer, validation_fraction


def _tokenise_here(piece: Piece) -> _Tokenised:
    assert _worker is not None
    return _tokenise(piece, *_worker)


def _tokenise(piece: Piece, tokenizer: Tokenizer, validation_fraction: float) -> _Tokenised:
    texts: dict[bool, list[str]] = {False: [], True: []}
    empty = not_text = 0
    for item in piece.items:
        text = read_text(item)
        if text is None:
            not_text += 1
        elif not text.strip():
            empty += 1
        else:
            texts[is_held_out(text, validation_fraction)].append(text)
    end = np.array([tokenizer.end_of_document], np.int64)
    dtype = smallest_dtype(tokenizer.vocab_size)
    tokens: dict[bool, NDArray[np.generic]] = {}
    lengths: dict[bool, Ints] = {}
    for held_out, side in texts.items():
        encoded = tokenizer.encode_many(side)
        parts = [part for ids in encoded for part in (ids, end)]
        # Narrow, as this crosses a pipe; the tokenizer's ids fit by the definition of its vocab_size.
        tokens[held_out] = np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)
        lengths[held_out] = np.array([len(ids) + 1 for ids in encoded], np.int64)
    return _Tokenised(tokens, lengths, empty, not_text, piece.input_bytes)


def _training_texts(
    work: Iterable[Piece],
    files: Sequence[InputFile],
    validation_fraction: float,
    on_progress: OnProgress | None,
) -> Iterator[str]:
    """Documents that a vocabulary is learned from: none held out, and a share chosen by hash of a corpus
    larger than needed.
    """
    total = sum(file.size for file in files)
    share = min(1.0, TOKENIZER_TRAINING_BYTES / max(1, total))
    done = documents = 0
    for piece in work:
        for item in piece.items:
            text = read_text(item)
            if not text or is_held_out(text, validation_fraction):
                continue
            if _hash_is_below(text, share, b"ultrascale.vocab"):
                documents += 1
                yield text
        done += piece.input_bytes
        if on_progress is not None:
            on_progress(Progress("tokenizer", done, total, documents))


def _vocabulary_to_train(tokenizer: str) -> int | None:
    if not tokenizer.startswith("train:"):
        return None
    if not re.fullmatch(r"train:[0-9]{1,9}", tokenizer):
        raise DataError(f"--tokenizer {tokenizer}: write train: and a vocabulary size, such as train:8192")
    return int(tokenizer.removeprefix("train:"))


def _check_arguments(workers: int | None, validation_fraction: float) -> int:
    if not 0 <= validation_fraction < 1:
        raise DataError(f"--validation-fraction {validation_fraction} is not in [0, 1); use a share such as 0.01")
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise DataError(f"--workers {workers} is not at least 1")
    return workers


def _refuse_existing(targets: Sequence[Path]) -> None:
    for path in targets:
        if path.exists():
            raise DataError(f"{path}: exists already; name another output, or say --overwrite")


def _paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    return bin_path(prefix), idx_path(prefix), metadata_path(prefix)


def _folder(output: Path) -> Path:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{output.parent}: cannot be written ({error.strerror})") from error
    return output.parent


def _why_nothing_is_left(output: Path, split: _Split, fraction: float) -> str:
    if split.validation.documents:
        return (
            f"{output}: all {split.validation.documents} documents fall to validation; "
            f"lower --validation-fraction {fraction} or add documents"
        )
    return (
        f"{output}: the inputs hold no text ({split.empty} empty documents, {split.not_text} files that are not text)"
    )
