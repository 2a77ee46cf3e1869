"""What attention over cp sends, in closed form. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention layer on one rank, after tp has had its share of the heads."""

    tokens: int
    """On this rank: sequence · rows / cp."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    bytes: int
    """Of an element of keys, values, queries and their gradients."""
    wide_bytes: int
    """Of an element in which gradients of keys and values are summed up."""


def sent(shape: Shape, ring: int, ulysses: int) -> tuple[int, int]:
    """Bytes that a rank sends for one layer and micro-batch, (forward, backward); recomputation sends forward's again.

    Ring and all-gather send the same: each rank passes on (ring − 1) blocks of keys and values in either pass, and
    their gradients in backward. Ulysses sends what is not its own of queries, keys, values and outputs, whatever the
    sequence: (ulysses − 1) / ulysses of them. Blocks that a window or documents make useless on all further ranks are
    not sent on in a ring; this counts them all.
    """
    copies = lcm(shape.kv_heads, ulysses)
    kv = shape.tokens * copies * (shape.head_dim + shape.value_dim)  # of a ring place's tokens, of a rank's heads
    around = (ring - 1) * kv
    queries = shape.tokens * shape.heads * shape.head_dim
    outputs = shape.tokens * shape.heads * shape.value_dim
    traded = (queries + kv + outputs) * (ulysses - 1) // ulysses * shape.bytes
    return traded + around * shape.bytes, traded + around * (shape.bytes + shape.wide_bytes)
