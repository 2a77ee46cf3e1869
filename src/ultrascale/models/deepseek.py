"""DeepSeek-V2 and V3: multi-head latent attention, and experts behind the first layers (DeepSeek-AI 2024, §2.1)."""

from __future__ import annotations

from typing import ClassVar

from ultrascale.models.mixtral import Mixtral
from ultrascale.models.mla import MultiHeadLatentAttention
from ultrascale.models.moe import MoEBlock
from ultrascale.models.sizes import Sizes, llama_sizes
from ultrascale.models.transformer import AttentionLayer, Block


class DeepSeekBlock(MoEBlock):
    attention_class: ClassVar[type[AttentionLayer]] = MultiHeadLatentAttention


class DeepSeekV3(Mixtral):
    """Models with the attention of DeepSeek-V2 and V3.

    Rotation is half-split here, as for every family. The published weights pair neighbouring features
    (rope_interleave): between the two the rows of q_b_proj (or q_proj) and kv_a_proj_with_mqa that make a rope part
    are reordered, evens first, and nothing else; scores are sums over pairs, so no number of the model changes.
    """

    block: ClassVar[type[Block]] = DeepSeekBlock

    def sizes(self) -> Sizes:
        return super().sizes() if self.config.model.num_experts else llama_sizes(self.config)
