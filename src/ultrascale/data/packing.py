"""Best-fit packing: which pieces of documents share a sequence, so that little of it is left over.

Pieces are taken by decreasing length, and each goes into the bin that has the least room among those with enough. As
lengths are whole numbers, bins with equal room are alike: they are kept in blocks of neighbouring numbers, one pile of
blocks for each room, and a block takes pieces of one length in one go. The work grows with the number of pieces at
worst, and with the number of different lengths at best; sorting aside, it does not grow with the number of bins.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

OnPieces = Callable[[int, int], None]  # (pieces placed, of how many)

_TOLD_EVERY = 1 << 16  # pieces
_WORD = 10  # bits of a room that number the bit within its word


class Rooms:
    """Blocks of bins by the room that they have left, in [1, capacity]."""

    def __init__(self, capacity: int) -> None:
        self._blocks: dict[int, list[tuple[int, int]]] = {}
        # A set of the rooms that have a block: bits of words, and a word of the words that are not 0.
        self._words = [0] * ((capacity >> _WORD) + 1)
        self._some = 0

    def put(self, room: int, first: int, count: int) -> None:
        """Bins first … first + count − 1 have this room. Full ones and no bins at all are forgotten."""
        if not room or not count:
            return
        self._blocks.setdefault(room, []).append((first, count))
        self._words[room >> _WORD] |= 1 << (room & ((1 << _WORD) - 1))
        self._some |= 1 << (room >> _WORD)

    def take(self, needed: int) -> tuple[int, int, int] | None:
        """(room, first bin, bins) of a block with the least room of at least `needed`, which is taken out; None where
        there is none.
        """
        word, bit = needed >> _WORD, needed & ((1 << _WORD) - 1)
        found = self._words[word] >> bit << bit
        if not found:
            later = self._some >> (word + 1) << (word + 1)
            if not later:
                return None
            word = _lowest(later)
            found = self._words[word]
        room = word << _WORD | _lowest(found)
        blocks = self._blocks[room]
        first, count = blocks.pop()
        if not blocks:
            self._words[word] &= ~(1 << (room & ((1 << _WORD) - 1)))
            if not self._words[word]:
                self._some &= ~(1 << word)
        return room, first, count


def best_fit(lengths: Ints, capacity: int, on_pieces: OnPieces | None = None) -> Ints:
    """Bin of each piece [n], bins counted from 0; the same for the same lengths, each in [1, capacity]."""
    counts = np.bincount(lengths, minlength=capacity + 1)
    rooms, bins, placed, told = Rooms(capacity), 0, 0, 0
    runs = array("q")  # (first bin, bins, pieces in each), in the order of decreasing length
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        placed += left
        while left:
            block = rooms.take(length)
            if block is None:
                # No bin has room: as many new ones as the rest of this length fills.
                block = capacity, bins, -(-left // (capacity // length))
                bins += block[2]
            room, first, count = block
            each = room // length
            filled = min(count, left // each)
            last = left - filled * each if filled < count else 0  # fewer than `each`, in a bin of their own
            for these, pieces in ((filled, each), (min(1, last), last)):
                if these:
                    runs.extend((first, these, pieces))
                    rooms.put(room - pieces * length, first, these)
                    left -= these * pieces
                    first, count = first + these, count - these
            rooms.put(room, first, count)
        if on_pieces is not None and placed - told >= _TOLD_EVERY:
            told = placed
            on_pieces(placed, len(lengths))
    found = np.empty(len(lengths), np.int64)
    found[np.argsort(-lengths, kind="stable")] = _bins_of(np.frombuffer(runs, np.int64).reshape(-1, 3))
    return found


def cut(starts: Ints, lengths: Ints, capacity: int) -> tuple[Ints, Ints]:
    """(starts, lengths) of pieces of at most `capacity` tokens that documents [n] are cut into, in their order.

    A document that fits is one piece, one without tokens none; all pieces but a document's last are full.
    """
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    skipped = capacity * (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts))
    return starts[document] + skipped, np.minimum(lengths[document] - skipped, capacity)


def _bins_of(runs: Ints) -> Ints:
    """The bin of each piece, of runs [n, 3] of (first bin, bins, pieces in each)."""
    first, bins, each = runs.T
    pieces = bins * each
    run = np.repeat(np.arange(len(runs)), pieces)
    place = np.arange(len(run)) - (np.cumsum(pieces) - pieces)[run]
    return first[run] + place // each[run]


def _lowest(word: int) -> int:
    return (word & -word).bit_length() - 1
