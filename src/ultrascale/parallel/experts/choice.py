"""Which way tokens take to their experts, and what keeps DeepEP's from being it. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ultrascale.config.schema import Config
from ultrascale.kernels.choice import Refusal, installed

PACKAGE = "deep_ep"
INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@v1.2.1"
"""It is on no package index: it is built against the CUDA, torch and network that are there."""
RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Sizes of a group that DeepEP has settings for."""
VECTOR = 8
"""bfloat16 elements that its kernels move at a time."""


def expert_dispatch(config: Config, device: str) -> str:
    """What parallel.expert_dispatch means on this device (cpu or cuda)."""
    asked = config.parallel.expert_dispatch
    if asked != "auto":
        return asked
    return "all_to_all" if any(refusals(config, device, installed(PACKAGE))) else "deep_ep"


def refusals(config: Config, device: str, version: str | None) -> Iterator[Refusal]:
    """Everything that keeps deep_ep from running; a clause each, of which it is the subject.

    version   of the package that is installed
    """
    if device != "cuda":
        yield Refusal("runs on GPUs alone", "")
        return
    if version is None:
        yield Refusal(f"needs the package {PACKAGE}, which is not installed", INSTALL)
    if config.precision.compute != "bfloat16":
        yield Refusal(
            f"sends bfloat16 alone, and precision.compute={config.precision.compute}", "use precision.compute=bfloat16"
        )
    if config.model.hidden_size % VECTOR:
        yield Refusal(f"needs a model.hidden_size that is a multiple of {VECTOR}", "")
    parallel = config.parallel
    ranks, inside = (prod(getattr(parallel, axis) or 1 for axis in axes) for axes in _axes(config))
    if inside > 1:
        yield Refusal(
            "knows no experts that are cut inside, and parallel.expert_tensor_axes="
            f"[{', '.join(parallel.expert_tensor_axes or ())}] cut them",
            "use parallel.expert_tensor_axes=[]",
        )
    if ranks not in RANKS:
        yield Refusal(f"takes {', '.join(map(str, RANKS))} ranks, and parallel.expert_axes are {ranks}", "")


def _axes(config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return config.parallel.expert_axes, config.parallel.expert_tensor_axes or ()
