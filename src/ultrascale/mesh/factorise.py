"""Which sizes of the axes would fit a world, for the message of an error. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any, NamedTuple


class Factorisation(NamedTuple):
    """Sizes of the five axes whose product is the world size."""

    dp: int
    tp: int
    cp: int
    pp: int
    ep: int

    def __str__(self) -> str:
        """`dp=2 tp=4`: axes of size 1 are left out, dp never."""
        rest = [f"{axis}={size}" for axis, size in self._asdict().items() if axis != "dp" and size > 1]
        return " ".join([f"dp={self.dp}", *rest])


def fitting(world: int, config: Any, limit: int | None = None) -> list[Factorisation]:
    """Sizes of the axes that fill `world` ranks, the nearest to the config's first.

    Sizes that the model or the batch rules out (heads, KV heads, layers, samples per step) are left out,
    unless nothing would remain. Near means: few axes changed, dp first, then by the ratio.
    """
    every = list(_factorisations(world))
    allowed = [sizes for sizes in every if _possible(sizes, config)] or every
    return sorted(allowed, key=lambda sizes: (_distance(sizes, config.parallel), sizes))[:limit]


def _factorisations(world: int) -> Iterator[Factorisation]:
    for tp in _divisors(world):
        for cp in _divisors(world // tp):
            for pp in _divisors(world // (tp * cp)):
                for ep in _divisors(world // (tp * cp * pp)):
                    yield Factorisation(world // (tp * cp * pp * ep), tp, cp, pp, ep)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _possible(sizes: Factorisation, config: Any) -> bool:
    model, batch = config.model, config.batch
    key_value_heads = model.num_key_value_heads or model.num_attention_heads
    return (
        model.num_attention_heads % sizes.tp == 0
        and max(sizes.tp, key_value_heads) % min(sizes.tp, key_value_heads) == 0
        and sizes.pp <= model.num_hidden_layers
        and batch.global_size % (sizes.dp * sizes.ep * batch.micro_size) == 0
        and batch.sequence_length % (2 * sizes.cp if sizes.cp > 1 else 1) == 0
        and (sizes.ep == 1 or (model.num_experts is not None and model.num_experts % sizes.ep == 0))
    )


def _distance(sizes: Factorisation, parallel: Any) -> tuple[int, int, float]:
    """Changed axes other than dp, changed axes, and by how much; a dp that was left open costs nothing."""
    ratios = {
        axis: abs(log2(size / asked))
        for axis, size in sizes._asdict().items()
        if (asked := getattr(parallel, axis)) is not None and asked >= 1
    }
    changed = [axis for axis, ratio in ratios.items() if ratio]
    return len(set(changed) - {"dp"}), len(changed), sum(ratios.values())
