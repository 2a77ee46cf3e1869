"""Samples: chunks of a token stream, in an order that is computed.

The documents of a dataset stand one behind the other. Sample i is tokens [i·S, i·S + S + L) with S the
sequence length and L the lookahead (1 + depth of multi-token prediction). A dataset of T tokens has (T − 1)
// S samples: the last chunk without a next token for each of its tokens is dropped. That number does not
depend on L, so neither does the order; where a deeper prediction looks past the end of the data, it has no
target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.documents import PADDING
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.permutation import KeyedPermutation, derive_key

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One sequence with its lookahead.

    tokens  int64 [sequence_length + lookahead], fresh
    live    bool, same shape: whether a token may be a target; None means all of them
    starts  int64 [documents], ascending from 0: where documents begin among the tokens, those of the lookahead too.
            None when the sequence counts as one
    filled  tokens of text; what follows them only fills the sequence up. None means all of them
    """

    tokens: Ints
    live: NDArray[np.bool_] | None = None
    starts: Ints | None = None
    filled: int | None = None


class Source(Protocol):
    """A finite dataset of samples, to be shuffled anew in every epoch."""

    name: str
    fingerprint: str
    samples: int

    def read(self, index: int) -> Sample:
        """Sample `index` in [0, samples)."""
        ...


class Chunks:
    """The samples of a token file, in file order.

    With `vocab_size`, every token read is checked against it; with `documents`, samples say where documents begin. A
    document that began before the chunk begins with it. Raises DataError when the file is too short for
    one sample, and from `read` when a token id is out of range.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sequence_length: int,
        lookahead: int = 1,
        vocab_size: int | None = None,
        documents: bool = False,
    ) -> None:
        if sequence_length < 1 or lookahead < 1:
            raise ValueError(f"sequence_length={sequence_length} and lookahead={lookahead} must be at least 1")
        self.dataset = dataset
        self.name = dataset.prefix
        self.fingerprint = dataset.fingerprint
        self.sequence_length, self.lookahead, self.vocab_size = sequence_length, lookahead, vocab_size
        self.documents = documents
        self.samples = (dataset.tokens - 1) // sequence_length
        if self.samples == 0:
            way_out = "prepare more text"
            if dataset.tokens > 1:
                way_out = f"use batch.sequence_length={dataset.tokens - 1} or less, or {way_out}"
            raise DataError(
                f"{dataset.bin_path}: holds {dataset.tokens} tokens, and one sample of "
                f"batch.sequence_length={sequence_length} needs {sequence_length + 1}; {way_out}"
            )

    def read(self, index: int) -> Sample:
        """Sample `index`, from 0. Raises IndexError outside [0, samples)."""
        if not 0 <= index < self.samples:
            raise IndexError(f"{self.name}: sample {index} is not in [0, {self.samples})")
        start, width = index * self.sequence_length, self.sequence_length + self.lookahead
        there = min(width, self.dataset.tokens - start)
        tokens = self.dataset.read(start, there)
        if self.vocab_size is not None:
            refuse_out_of_range(self.dataset, start, tokens, self.vocab_size)
        starts = None
        if self.documents:
            begun = self.dataset.document_starts(start + 1, start + there) - start
            starts = np.concatenate([np.zeros(1, np.int64), begun])
        if there == width:
            return Sample(tokens, starts=starts)
        padded = np.full(width, PADDING, np.int64)
        padded[:there] = tokens
        return Sample(padded, np.arange(width) < there, starts, there)


def refuse_out_of_range(dataset: IndexedDataset, start: int, tokens: Ints, vocab_size: int) -> None:
    """Raises DataError that names file, place, value and limit when one of `tokens` (read at `start`) is no
    id of the model.
    """
    if tokens.size == 0 or (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        return
    at = int(((tokens < 0) | (tokens >= vocab_size)).argmax())
    raise DataError(out_of_range(dataset, int(tokens[at]), start + at, vocab_size))


def out_of_range(dataset: IndexedDataset, token: int, at: int, vocab_size: int) -> str:
    """The sentence for a token id that the model has no row for."""
    way_out = "the file is corrupt, or was not written as tokens"
    if token >= vocab_size:
        way_out = f"set model.vocab_size to at least {token + 1}, or prepare the text with a smaller tokenizer"
    return (
        f"{dataset.bin_path}: token {at} has id {token}, outside [0, {vocab_size}) of "
        f"model.vocab_size={vocab_size}; {way_out}"
    )


class EpochOrder:
    """The order in which the draws of one source meet its samples.

    Draw j is in epoch j // n, at place j % n of that epoch's permutation, which is keyed by (seed, what the
    source holds, epoch): not by where its files lie, what else is in the blend or how long the run is.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self.source = source
        self.seed = seed

    def epochs(self, draws: Ints) -> Ints:
        """Epoch of each draw [n], from 0."""
        return draws // self.source.samples

    def samples(self, draws: Ints) -> Ints:
        """Sample index of each draw [n], each in [0, source.samples)."""
        epochs, places = np.divmod(draws, self.source.samples)
        result = np.empty_like(draws)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = derive_key("sample order", self.seed, self.source.fingerprint, int(epoch))
            result[here] = KeyedPermutation(self.source.samples, key)(places[here])
        return result
