"""Fixtures that every test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool import close_pools


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
