"""One pass over the bytes of a stored tensor: checksum, values that are not finite, norm. Needs no torch."""

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
from ultrascale.checkpoint.values import FLOATING, UNSIGNED, numbers

BLOCK_BYTES = 1 << 20

Advance = Callable[[int], None]
"""Told how many bytes more are done."""


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

    @property
    def norm(self) -> float:
        return sqrt(self.squares)


def scan_place(tensor: StoredTensor, place: Place, values: bool, advance: Advance | None = None) -> Scan:
    """Reads one place once, in blocks.

    values   whether to find norm, largest value and values that are not finite beside the checksum
    """
    size, sha, total = width(tensor.dtype), hashlib.sha256(), elements(place.shape)
    floating = tensor.dtype in FLOATING
    squares, largest, bad, first = 0.0, 0.0, 0, None
    step = BLOCK_BYTES // size
    with Reader() as reader:
        for start in range(0, total, step):
            count = min(step, total - start)
            raw = reader.bytes(place, start * size, count * size)
            sha.update(raw.data)
            bits = raw.view(UNSIGNED[size])
            if values and floating:
                found = numbers(bits, tensor.dtype).astype(np.float64, copy=False)
                finite = np.isfinite(found)
                if not finite.all():
                    if first is None:
                        inner = np.unravel_index(start + int(np.argmin(finite)), place.shape or (1,))
                        first = tuple(int(i) + o for i, o in zip(inner, place.offset))
                    bad += int(count - finite.sum())
                    found = found[finite]
                # Scaled, so that squares of large numbers stay finite and those of small ones are not lost.
                top = float(np.abs(found).max(initial=0.0))
                if top:
                    squares += float(np.square(found / top).sum()) * top * top
                largest = max(largest, top)
            if advance is not None:
                advance(count * size)
    return Scan("sha256:" + sha.hexdigest(), squares, largest, bad, first)


def joined(scans: Sequence[Scan]) -> Scan:
    """The scan of a tensor from those of its places."""
    return Scan(
        "",
        sum(scan.squares for scan in scans),
        max((scan.largest for scan in scans), default=0.0),
        sum(scan.not_finite for scan in scans),
        min((scan.first for scan in scans if scan.first is not None), default=None),
    )


def scan_all(
    places: Sequence[tuple[StoredTensor, Place]], values: bool, advance: Advance | None = None, threads: int = 2
) -> Iterator[Scan]:
    """The scans of many places, in order; two at a time, for hashing and arithmetic wait for nobody's lock."""
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda item: scan_place(item[0], item[1], values, advance), places)
