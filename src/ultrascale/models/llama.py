"""Llama: RMS norm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023; Grattafiori et al. 2024)."""

from __future__ import annotations

from typing import ClassVar

from ultrascale.config.schema import Config
from ultrascale.models import mtp
from ultrascale.models.sizes import Sizes, llama_sizes
from ultrascale.models.stage import Stage
from ultrascale.models.transformer import Block
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
        """Cross entropy; the z-loss (Chowdhery et al. 2022, PaLM §5): coefficient · mean of lse²; and the mean over
        depths of the cross entropies of further tokens (DeepSeek-V3 2024, equation 25)."""
        model = self.config.model
        terms = {"lm": Term("targets", 1.0)}
        if model.z_loss_coefficient:
            terms["z"] = Term("targets", model.z_loss_coefficient)
        depths = model.num_nextn_predict_layers
        for depth in range(depths):
            terms[mtp.term(depth)] = Term(mtp.targets(depth), model.mtp_loss_coefficient / depths)
        return terms

    def stage(self, build: Build, layers: range, embedding: bool, head: bool) -> Stage:
        return Stage(build, self.config, layers, embedding, head, self.block)
