"""Every package's say about a config, before torch is imported and before any process group exists."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import ultrascale
from ultrascale.config.load import COMMAND_LINE, DEFAULT, DERIVED, Loaded
from ultrascale.config.problem import ConfigError, Problem
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config, flatten

# In the order in which they may import each other; those that have a check.py are asked.
PACKAGES = (
    "config",
    "mesh",
    "comm",
    "precision",
    "kernels",
    "parallel",
    "models",
    "pipeline",
    "optim",
    "data",
    "checkpoint",
    "observe",
    "planner",
)


def check(loaded: Loaded, world_size: int, files: bool = False) -> Config:
    """The resolved config, which every package can run on `world_size` processes.

    With `files`, what the config names on disk must be there too: for a program that is about to read it.
    Idle keys that a file set become notices in `loaded`. Raises ConfigError with all problems.
    """
    try:
        config = resolve(loaded.config, world_size, _mesh_fitting)
    except ConfigError as error:
        raise ConfigError([_located(problem, loaded) for problem in error.problems]) from None

    problems = []
    for problem in _problems(config, files):
        problem = _located(problem, loaded)
        if problem.kind == "error" or problem.origin == COMMAND_LINE:
            problems.append(problem)
        elif loaded.origin(problem.key) != DEFAULT:
            loaded.notices.append(str(problem))
    if problems:
        raise ConfigError(problems)
    return config


def check_device(loaded: Loaded, config: Config, device: str) -> None:
    """What only shows on a device (cpu or cuda): asks those packages that have a say. Raises ConfigError."""
    problems: list[Problem] = []
    for module in _checks():
        if hasattr(module, "check_device"):
            problems += module.check_device(config, device)
    if problems:
        raise ConfigError([_located(problem, loaded) for problem in problems])


def origins(loaded: Loaded, config: Config) -> dict[str, str]:
    """Where each value of the resolved `config` came from, key by key."""
    before = flatten(loaded.config)
    return {key: DERIVED if value != before[key] else loaded.origin(key) for key, value in flatten(config).items()}


def _problems(config: Config, files: bool) -> list[Problem]:
    """What the packages' checks return, in the order of the packages."""
    problems: list[Problem] = []
    for module in _checks():
        problems += module.check(config)
        if files and hasattr(module, "check_files"):
            problems += module.check_files(config)
    return problems


def _checks() -> Iterator[ModuleType]:
    """The check.py of each package that has one."""
    root = Path(ultrascale.__file__).parent
    for package in PACKAGES:
        if (root / package / "check.py").is_file():
            yield importlib.import_module(f"ultrascale.{package}.check")


def _mesh_fitting(world_size: int, config: Config) -> Sequence[object]:
    """Ways to cut the world that the check of layouts would let pass."""
    fitting = importlib.import_module("ultrascale.mesh.factorise").fitting(world_size, config)
    check = importlib.import_module("ultrascale.parallel.check").check
    found = []
    for cut in fitting:
        sizes = {axis: getattr(cut, axis) for axis in ("dp", "tp", "cp", "pp", "ep")}
        with_it = config.model_copy(update={"parallel": config.parallel.model_copy(update=sizes)})
        if not any(problem.kind == "error" for problem in check(resolve(with_it, world_size))):
            found.append(cut)
    return found


def _located(problem: Problem, loaded: Loaded) -> Problem:
    origin = loaded.origin(problem.key)
    return replace(problem, origin=str(loaded.path) if origin == DEFAULT else origin)
