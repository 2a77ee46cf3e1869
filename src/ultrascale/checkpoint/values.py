"""What stored bits mean, without torch: arrays of unsigned integers as numbers, and from one dtype to another.

numpy has no bfloat16 and no float8; the bits of a bfloat16 are the upper half of a float32's, and a float8 has 256
values. A change to a wider dtype is exact; one to a narrower rounds to nearest, ties to even, once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bits = np.ndarray[Any, np.dtype[Any]]
"""Elements of a tensor as unsigned integers of their width."""

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FLOATING = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
CONVERTIBLE = ("float64", "float32", "bfloat16", "float16")
_SAME = {"float64": np.float64, "float32": np.float32, "int64": np.int64, "int32": np.int32, "uint8": np.uint8}


def numbers(bits: Bits, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """The values, in a dtype that holds them: float32 or float64 of floats, integers of integers."""
    if dtype in _SAME:
        return bits.view(_SAME[dtype])
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "float8_e4m3fn":
        return _E4M3[bits]
    assert dtype == "bool"
    return bits.view(np.uint8)


def convert(bits: Bits, source: str, target: str) -> Bits:
    """The bits of the same values in another of CONVERTIBLE; what is beyond float16 becomes infinite."""
    if source == target:
        return bits
    values = numbers(bits, source)
    if target == "bfloat16":
        return _to_bfloat16(_to_odd(values) if source == "float64" else values)
    with np.errstate(over="ignore", invalid="ignore"):
        changed = values.astype({"float64": np.float64, "float32": np.float32, "float16": np.float16}[target])
    return changed.view(UNSIGNED[changed.dtype.itemsize])


def exact(source: str, target: str) -> bool:
    """Whether every value of `source` is one of `target`."""
    wider = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
    return source == target or target in wider.get(source, ())


def _to_bfloat16(values: np.ndarray[Any, np.dtype[Any]]) -> Bits:
    """float32 → bfloat16."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    # A NaN whose payload lies in the lower half would become an infinity, or wrap around.
    rounded = np.where(np.isnan(values) & ((bits & 0xFFFF) != 0), (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16)


def _to_odd(values: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """float64 → float32 with an odd last bit wherever something was cut off: a second rounding then sees no false tie
    (Boldo and Melquiond 2008)."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = values.astype(np.float32)
        error = values - near.astype(np.float64)
    bits = near.view(np.uint32).copy()
    inexact = np.isfinite(near) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (near > 0)
    # Zero has no sign to go by: what was cut off a tiny number is its sign.
    bits = np.where(inexact & (near == 0), np.where(error > 0, 1, 0x80000001), bits)
    bits = np.where(inexact & (near != 0), np.where(away, bits + 1, bits - 1), bits)
    return bits.astype(np.uint32).view(np.float32)


def _e4m3_values() -> np.ndarray[Any, np.dtype[np.float32]]:
    """All 256 values: 4 bits of exponent with bias 7, 3 of mantissa, no infinity (Micikevicius et al. 2022)."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where(bits & 127 == 127, np.nan, size)
    return np.where(bits < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3_values()
