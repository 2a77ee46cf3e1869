"""Llama: RMS norm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from typing import ClassVar

from ultrascale.config.schema import Config
from ultrascale.models.sizes import Sizes, llama_sizes
from ultrascale.models.transformer import Block, Stage
from ultrascale.parallel.module import Build
from ultrascale.parallel.objective import Term


class Llama:
    """The Llama family, all sizes and versions."""

    block: ClassVar[type[Block]] = Block

    def __init__(self, config: Config) -> None:
        self.config = config

    def sizes(self) -> Sizes:
        return llama_sizes(self.config)

    def terms(self) -> dict[str, Term]:
        """Cross entropy, and the z-loss (Chowdhery et al. 2022, PaLM §5): coefficient · mean of lse²."""
        terms = {"lm": Term("targets", 1.0)}
        if self.config.model.z_loss_coefficient:
            terms["z"] = Term("targets", self.config.model.z_loss_coefficient)
        return terms

    def stage(self, build: Build, layers: range, embedding: bool, head: bool) -> Stage:
        return Stage(build, self.config, layers, embedding, head, self.block)
