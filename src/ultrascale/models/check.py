"""What a config can get wrong about its model, whatever the layout. Needs no torch."""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import re
import sys

from ultrascale.config.problem import Problem, choices
from ultrascale.config.schema import Config
from ultrascale.models.family import FAMILIES

_OUTSIDE = re.compile(r"(?P<package>[A-Za-z_]\w*)(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check(config: Config) -> list[Problem]:
    """Problems of the keys `model.*`. Takes a resolved config."""
    model = config.model
    problems = _family(model.family)
    if model.family in FAMILIES:
        if model.options:
            message = f"model.options has no effect under model.family={model.family}; leave it out"
            problems.append(Problem("model.options", message, kind="idle"))
        for name in ("expert_axes", "expert_tensor_axes"):
            message = f"parallel.{name} has no effect under model.family={model.family}, which has no experts"
            problems.append(Problem(f"parallel.{name}", f"{message}; leave it out", kind="idle"))
    if model.head_dim is not None and model.head_dim % 2:
        message = (
            f"model.head_dim={model.head_dim} is odd, and rotary embeddings turn pairs; "
            f"use {choices([size for size in (model.head_dim - 1, model.head_dim + 1) if size])}"
        )
        problems.append(Problem("model.head_dim", message))
    if config.batch.sequence_length > model.max_position_embeddings:
        message = (
            f"batch.sequence_length={config.batch.sequence_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}; use at most "
            f"{model.max_position_embeddings}, or raise model.max_position_embeddings"
        )
        problems.append(Problem("batch.sequence_length", message))
    scaling = model.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        message = (
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} must be above "
            f"low_freq_factor={scaling.low_freq_factor}; Llama 3.1 has 4 and 1"
        )
        problems.append(Problem("model.rope_scaling.high_freq_factor", message))
    return problems


def _family(name: str) -> list[Problem]:
    """A family of the tree, or a class outside it whose package this Python can find (it is not imported
    here)."""
    if name in FAMILIES:
        return []
    outside = _OUTSIDE.fullmatch(name)
    if outside is None:
        near = difflib.get_close_matches(name.lower(), FAMILIES, n=1)
        known = f"did you mean {near[0]}?" if near else f"use {choices(list(FAMILIES))}, or package.module:Family"
        return [Problem("model.family", f"model.family={name} is not a family of this version; {known}")]
    package = outside["package"]
    # A built-in or already imported module has no path entry of its own.
    if package in sys.modules or importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]):
        return []
    message = f"model.family={name}: Python finds no package {package}; install it, or add it to PYTHONPATH"
    return [Problem("model.family", message)]
