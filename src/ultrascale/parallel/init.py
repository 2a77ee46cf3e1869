"""Initial values that no layout can change: a function of (seed, logical name, global index).

Each element's bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
with the element's global index as counter and a hash of (seed, name) as key. Two neighbours share one counter and its
Box-Muller pair. The integers are equal on all devices; the normals are computed in contiguous float64 and rounded
last, so that they are equal within a device type. A rank makes only its own box, block by block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import pi, prod

import torch

from ultrascale.parallel.layout import Constant, Layout, Normal

BLOCK = 1 << 16
"""Elements made at a time: the temporaries stay in cache and the peak stays near the box itself."""

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def key_of(seed: int, name: str) -> tuple[int, int]:
    """The two 32-bit key words of one logical parameter (or of any other purpose that needs draws)."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(
    counter: torch.Tensor, key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words (held in int64) per counter.

    counter  int64 [n], taken as the low 64 of the 128 counter bits
    """
    x0, x1 = counter & _LOW, (counter >> 32) & _LOW
    x2, x3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 32×32 → 64-bit products wrap in int64; both halves are right after masking, also of a negative one.
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((product1 >> 32) & _LOW) ^ x1 ^ k0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ x3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return x0, x1, x2, x3


def _fraction(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1) with 53 bits from two 32-bit words."""
    return (((high >> 5) << 26) + (low >> 6)).to(torch.float64) * 2.0**-53


def uniform_at(index: torch.Tensor, seed: int, purpose: str) -> torch.Tensor:
    """Uniforms in [0, 1), float64 [n], keyed by what they are for and a place int64 [n]."""
    words = philox(index, key_of(seed, purpose))
    return _fraction(words[0], words[1])


def normal_at(index: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Standard normals, float64 [n], for global indices int64 [n] (contiguous)."""
    words = philox(index >> 1, key)
    # In (0, 1], so that the logarithm is finite.
    radius = torch.sqrt(-2.0 * torch.log(_fraction(words[0], words[1]) + 2.0**-53))
    angle = _fraction(words[2], words[3]) * (2.0 * pi)
    return radius * torch.where((index & 1) == 0, torch.cos(angle), torch.sin(angle))


def global_index(layout: Layout, offset: tuple[int, ...], box: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Row-major global indices of the elements of a box at `offset`; int64 [elements of the box]."""
    rest = torch.arange(prod(box), dtype=torch.int64, device=device)
    index = torch.zeros_like(rest)
    stride = 1
    for dim in reversed(range(len(box))):
        index += (rest % box[dim] + offset[dim]) * stride
        rest = rest // box[dim]
        stride *= layout.shape[dim]
    return index


@torch.no_grad()
def initialise(target: torch.Tensor, layout: Layout, offset: tuple[int, ...], seed: int) -> None:
    """Fills `target`, this rank's box of the parameter at `offset` of the global tensor (a view of any dtype).

    The box must not reach into padding: `target.shape` is the box's own shape.
    """
    if isinstance(layout.init, Constant):
        target.fill_(layout.init.value)
        return
    assert isinstance(layout.init, Normal)
    key = key_of(seed, layout.name)
    for part in _blocks(tuple(target.shape)):
        piece = target[part]
        corner = tuple(start + cut.start for start, cut in zip(offset, part, strict=True))
        index = global_index(layout, corner, tuple(piece.shape), target.device)
        piece.copy_((normal_at(index, key) * layout.init.std).to(target.dtype).view(piece.shape))


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Pieces of at most BLOCK elements that make up a box of this shape: some rows, or a part of one row."""
    if not all(shape):
        return
    row, rest = prod(shape[1:]), tuple(slice(0, size) for size in shape[1:])
    if row <= BLOCK:
        step = BLOCK // row
        for start in range(0, shape[0], step):
            yield (slice(start, min(shape[0], start + step)), *rest)
        return
    for start in range(shape[0]):
        for part in _blocks(shape[1:]):
            yield (slice(start, start + 1), *part)
