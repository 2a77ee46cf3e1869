"""Fixtures that every test shares."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool import close_pools
from warm import programs


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture(scope="session")
def warm() -> Iterator[Path]:
    """A folder with `python`, `torchrun` and `pytest` that have torch already."""
    with programs() as folder:
        yield folder


def pytest_collection_finish() -> None:
    """What was imported and collected stays: every run of the trainer ends with a look through all objects."""
    gc.collect()
    gc.freeze()
