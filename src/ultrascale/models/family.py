"""What a model family is: the small interface through which the rest of the system builds and counts a model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ultrascale.config.schema import Config
from ultrascale.models.sizes import Sizes

if TYPE_CHECKING:  # this file is read by commands that must not import torch
    import torch
    from torch import nn

    from ultrascale.models.batch import MicroBatch
    from ultrascale.parallel.module import Build
    from ultrascale.parallel.objective import Term
    from ultrascale.parallel.passes import Pass

FAMILIES = {
    "llama": "ultrascale.models.llama:Llama",
    "mixtral": "ultrascale.models.mixtral:Mixtral",
    "qwen3": "ultrascale.models.qwen3:Qwen3",
    "qwen3_moe": "ultrascale.models.qwen3_moe:Qwen3MoE",
    "deepseek_v3": "ultrascale.models.deepseek:DeepSeekV3",
}
"""Families of the tree; any other is named `package.module:Family`."""


class StageModule(Protocol):
    """One pipeline stage of a model."""

    def units(self) -> list[tuple[str, nn.Module]]:
        """(name, module) in order of use; the names are unique in the whole model."""

    def __call__(
        self, hidden: torch.Tensor | None, batch: MicroBatch, current: Pass
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]] | dict[str, torch.Tensor]:
        """[seq (/ tp), batch, hidden] → the same, or with {term: sum} of what lies on this stage beside it (an extra
        head, the balance of a router); from the last stage {term: sum} alone, or logits without labels."""


class FamilyError(Exception):
    """model.family names nothing that can be loaded."""


class Family(Protocol):
    """One model architecture."""

    def __init__(self, config: Config) -> None: ...

    def sizes(self) -> Sizes:
        """Counts in closed form; the start-up check compares them with what was built."""

    def terms(self) -> Mapping[str, Term]:
        """Terms of the objective, each with its denominator and coefficient."""

    def stage(self, build: Build, layers: range, embedding: bool, head: bool) -> StageModule:
        """Builds one pipeline stage on the meta device."""


def load_family(name: str) -> type[Family]:
    """The class that `model.family` names; imports it (and with it torch).

    Raises FamilyError when the module cannot be imported or has no such class.
    """
    module, _, attribute = FAMILIES.get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise FamilyError(f"model.family={name} cannot be loaded: {error}") from error
