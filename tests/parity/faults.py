"""Faults that are seeded into product code, to see the parity comparison go red.

Each one is a mistake that was made somewhere: a reduction forgotten, doubled, averaged or done over the wrong ranks.
It replaces one function of the product while a cell runs; the comparison itself is never touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from ultrascale.parallel.gradients import Gradients, Reduction

Patch = contextlib.AbstractContextManager[Any]
FAULTS: dict[str, Callable[[], Patch]] = {}


def fault(function: Callable[[], Patch]) -> Callable[[], Patch]:
    FAULTS[function.__name__] = function
    return function


@contextlib.contextmanager
def seeded(name: str | None) -> Iterator[None]:
    """The product with one fault in it; None: as it is."""
    with FAULTS[name]() if name else contextlib.nullcontext():
        yield


@fault
def tensor_sums_are_skipped() -> Patch:
    """Norms under sequence parallelism and replicated KV heads keep each tp rank's own part."""
    return patch.object(Gradients, "_tensor_sums", lambda self: {})


@fault
def batch_sums_are_doubled() -> Patch:
    """Every bucket is reduced twice."""
    original = Gradients._sum

    def twice(self: Gradients, flat: torch.Tensor, group: Any) -> Reduction:
        original(self, flat, group).finish()
        return original(self, flat, group)

    return patch.object(Gradients, "_sum", twice)


@fault
def batch_sums_are_averages() -> Patch:
    """The reductions divide by the number of ranks."""
    original = Reduction.finish

    def average(self: Reduction) -> None:
        original(self)
        self.target.div_(2)

    return patch.object(Reduction, "finish", average)


@fault
def ties_are_forgotten() -> Patch:
    """Embedding and head on different stages keep their own gradients."""
    original = Gradients.__init__

    def without(self: Gradients, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "tie_groups": {}})

    return patch.object(Gradients, "__init__", without)
