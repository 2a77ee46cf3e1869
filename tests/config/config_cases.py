"""What the tests of the config package share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ultrascale.config import collect
from ultrascale.config.load import Loaded, load
from ultrascale.config.problem import ConfigError
from ultrascale.config.schema import Config

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "configs" / "debug.yaml"


def checked(*overrides: str, world: int = 1, path: Path = DEBUG) -> tuple[Config, Loaded]:
    """debug.yaml with overrides, loaded and checked for `world` processes."""
    loaded = load(path, overrides)
    return collect.check(loaded, world), loaded


def refusal(*overrides: str, world: int = 1, path: Path = DEBUG) -> str:
    """What the user reads; fails when the config is accepted."""
    with pytest.raises(ConfigError) as error:
        checked(*overrides, world=world, path=path)
    return str(error.value)
