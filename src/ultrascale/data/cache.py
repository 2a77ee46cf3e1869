"""Where files lie that are made on first use, and how one process of a host makes them while the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

CACHE_VARIABLE = "ULTRASCALE_CACHE"


def cache_folder() -> Path:
    """$ULTRASCALE_CACHE, else ~/.cache/ultrascale."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "ultrascale"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; without one where the file system has none, as the rename alone keeps the
    cache right.
    """
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
