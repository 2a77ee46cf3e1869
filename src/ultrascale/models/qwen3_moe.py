"""Qwen3 with experts: 30B-A3B, 235B-A22B (Yang et al. 2025)."""

from __future__ import annotations

from typing import ClassVar

from ultrascale.models.mixtral import Mixtral
from ultrascale.models.moe import MoEBlock
from ultrascale.models.qwen3 import NormedAttention, head_norm_parameters
from ultrascale.models.sizes import Sizes
from ultrascale.models.transformer import Attention, Block


class Qwen3MoEBlock(MoEBlock):
    attention_class: ClassVar[type[Attention]] = NormedAttention


class Qwen3MoE(Mixtral):
    """The mixtures of the Qwen3 family."""

    block: ClassVar[type[Block]] = Qwen3MoEBlock

    def sizes(self) -> Sizes:
        return super().sizes().plus_norms(self.config.model, head_norm_parameters(self.config.model))
