"""The samples of a packed dataset: whole documents, and padding behind them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.bin_index import BinIndex
from ultrascale.data.documents import PADDING
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.samples import Sample, refuse_out_of_range

Ints = NDArray[np.int64]


class Bins:
    """The bins of a packing as samples, each with its documents in the order of the file.

    Padding fills a sample up; none of it is a target, and it counts as a document of its own. Every token read is
    checked against vocab_size. Raises DataError from `read` when a token id is out of range.
    """

    def __init__(self, dataset: IndexedDataset, index: BinIndex, lookahead: int, vocab_size: int) -> None:
        self.dataset, self.index = dataset, index
        self.name = dataset.prefix
        self.fingerprint = dataset.fingerprint
        self.samples = index.bins
        self.lookahead, self.vocab_size = lookahead, vocab_size

    def read(self, index: int) -> Sample:
        """Sample `index`, from 0. Raises IndexError outside [0, samples)."""
        if not 0 <= index < self.samples:
            raise IndexError(f"{self.name}: bin {index} is not in [0, {self.samples})")
        length = self.index.sequence_length
        tokens = np.full(length + self.lookahead, PADDING, np.int64)
        filled, begins = 0, []
        for start, count in self.index.pieces_of(index):
            if count == length:
                # The piece may be a document's, cut, that goes on: then its last token has a target too.
                count += self._follow(start + count)
            piece = self.dataset.read(start, count)
            refuse_out_of_range(self.dataset, start, piece, self.vocab_size)
            tokens[filled : filled + count] = piece
            begins.append(filled)
            filled += count
        if filled < len(tokens):
            begins.append(filled)
        return Sample(tokens, np.arange(len(tokens)) < filled, np.array(begins, np.int64), filled)

    def _follow(self, end: int) -> int:
        """How many of the `lookahead` tokens from `end` on belong to the document of the token before."""
        stop = min(end + self.lookahead, self.dataset.tokens)
        starts = self.dataset.document_starts(end, stop)
        return (int(starts[0]) if len(starts) else stop) - end
