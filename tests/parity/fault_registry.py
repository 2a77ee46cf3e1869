"""The register of faults that are seeded into product code (`faults.py` and its siblings fill it)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

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
