"""Where documents begin within a sequence, and what follows from it for targets and positions.

Sequences of a run can hold several documents: a chunk of the stream the end of one and the start of the next, a packed
sequence whole ones. Where a config asks for it they are kept apart: no token is a target of another document's, and
positions restart with each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PADDING = 0
"""The id of tokens that only fill a sequence up. Every vocabulary has it; nothing attends to them or predicts them."""


def document_numbers(starts: Ints, width: int) -> Ints:
    """Document of each token [width], counted from 0 within the sequence; starts [documents] begin with 0."""
    begins = np.zeros(width, np.int64)
    begins[starts] = 1
    return np.cumsum(begins) - 1


def crosses(starts: Ints, depth: int, length: int) -> NDArray[np.bool_]:
    """Whether the token `depth` places on belongs to another document, for each of the first `length` tokens."""
    numbers = document_numbers(starts, max(length + depth, int(starts[-1]) + 1))
    return numbers[:length] != numbers[depth : depth + length]


def positions_within(starts: Ints, length: int) -> Ints:
    """Place of each token [length] in its document, or in what the sequence holds of it."""
    inside = starts[starts < length]
    return np.arange(length, dtype=np.int64) - inside[document_numbers(inside, length)]
