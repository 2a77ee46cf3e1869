"""One pass over the bytes of a stored tensor: checksum, values that are not finite, norm, and a digest that does not
depend on how the tensor is cut. Needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt

import numpy as np

from ultrascale.checkpoint.boxes import Dims, elements
from ultrascale.checkpoint.safetensors_file import width
from ultrascale.checkpoint.stored import Place, Reader, StoredTensor
from ultrascale.checkpoint.values import FLOATING, UNSIGNED, Bits, numbers

BLOCK_BYTES = 1 << 20
_CACHED = 1 << 15
"""Elements that a digest mixes at a time: they and their temporaries stay in cache."""

Advance = Callable[[int], None]
"""Told how many bytes more are done."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a scan is to find beside the checksum; each costs a pass over the values in memory."""

    values: bool = False
    """Norm, largest value, values that are not finite."""
    digest: bool = False


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found in one place, or in all places of a tensor."""

    checksum: str = ""
    """Of one place."""
    squares: float = 0.0
    """Σ of the squares of the finite values, in float64."""
    largest: float = 0.0
    """Of the finite absolute values."""
    not_finite: int = 0
    first: Dims | None = None
    """Global index of the first value that is not finite."""
    digest: int = 0

    @property
    def norm(self) -> float:
        return sqrt(self.squares)


def scan_place(tensor: StoredTensor, place: Place, wanted: Wanted, advance: Advance | None = None) -> Scan:
    """Reads one place once, in blocks."""
    size, sha, total = width(tensor.dtype), hashlib.sha256(), elements(place.shape)
    floating = tensor.dtype in FLOATING
    squares, largest, bad, first, mixed = 0.0, 0.0, 0, None, 0
    step = BLOCK_BYTES // size
    with Reader() as reader:
        for start in range(0, total, step):
            count = min(step, total - start)
            raw = reader.bytes(place, start * size, count * size)
            sha.update(raw.data)
            bits = raw.view(UNSIGNED[size])
            if wanted.values and floating:
                values = numbers(bits, tensor.dtype).astype(np.float64, copy=False)
                finite = np.isfinite(values)
                if not finite.all():
                    if first is None:
                        inner = np.unravel_index(start + int(np.argmin(finite)), place.shape or (1,))
                        first = tuple(int(i) + o for i, o in zip(inner, place.offset))
                    bad += int(count - finite.sum())
                    values = values[finite]
                # Scaled, so that squares of large numbers stay finite and those of small ones are not lost.
                top = float(np.abs(values).max(initial=0.0))
                if top:
                    squares += float(np.square(values / top).sum()) * top * top
                largest = max(largest, top)
            if wanted.digest:
                mixed += element_digest(bits, tensor.shape, place.offset, place.shape, start)
            if advance is not None:
                advance(count * size)
    return Scan("sha256:" + sha.hexdigest(), squares, largest, bad, first, mixed % 2**64)


def joined(scans: Sequence[Scan]) -> Scan:
    """The scan of a tensor from those of its places."""
    return Scan(
        "",
        sum(scan.squares for scan in scans),
        max((scan.largest for scan in scans), default=0.0),
        sum(scan.not_finite for scan in scans),
        min((scan.first for scan in scans if scan.first is not None), default=None),
        sum(scan.digest for scan in scans) % 2**64,
    )


def scan_all(
    places: Sequence[tuple[StoredTensor, Place]], wanted: Wanted, advance: Advance | None = None, threads: int = 2
) -> Iterator[Scan]:
    """The scans of many places, in order; two at a time, for hashing and arithmetic wait for nobody's lock."""
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda item: scan_place(item[0], item[1], wanted, advance), places)


def element_digest(bits: Bits, whole: Dims, offset: Dims, shape: Dims, start: int) -> int:
    """Σ over elements of a 64-bit mix of (global index, bits), modulo 2⁶⁴: the same however a tensor is cut.

    bits    the elements [start, start + len) of the box at `offset` of `shape`, in row-major order
    It tells elements that were lost, doubled, moved or changed. It is no protection against an enemy; SHA-256 is.
    """
    strides = [1] * len(whole)
    for dim in reversed(range(len(whole) - 1)):
        strides[dim] = strides[dim + 1] * whole[dim + 1]
    total = 0
    flat = bits.reshape(-1)
    for begin in range(0, len(flat), _CACHED):
        part = flat[begin : begin + _CACHED]
        total += int(_mix(part, _global_index(start + begin, len(part), offset, shape, strides)).sum(dtype=np.uint64))
    return total % 2**64


def _global_index(start: int, count: int, offset: Dims, shape: Dims, strides: Sequence[int]) -> Bits:
    """uint64 [count]: index in the whole tensor of the box's elements [start, start + count)."""
    rest = np.arange(start, start + count, dtype=np.int64)
    index = np.zeros(count, np.int64)
    for dim in reversed(range(len(shape))):
        if dim == 0:
            here = rest
        else:
            rest, here = np.divmod(rest, shape[dim])
        index += (here + offset[dim]) * strides[dim]
    return index.view(np.uint64)


def _mix(bits: Bits, index: Bits) -> Bits:
    """A bijection of 64-bit words with good avalanche (Steele, Lea and Flood 2014: SplitMix64's finaliser)."""
    word = bits.astype(np.uint64)
    word += index * np.uint64(0x9E3779B97F4A7C15)
    word ^= word >> np.uint64(30)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    word ^= word >> np.uint64(27)
    word *= np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word
