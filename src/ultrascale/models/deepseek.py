"""DeepSeek-V3: multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V3, §2.1), here with dense layers."""

from __future__ import annotations

from typing import ClassVar

from ultrascale.models.llama import Llama
from ultrascale.models.mla import MultiHeadLatentAttention
from ultrascale.models.transformer import AttentionLayer, Block


class DeepSeekBlock(Block):
    attention_class: ClassVar[type[AttentionLayer]] = MultiHeadLatentAttention


class DeepSeekV3(Llama):
    """Models with the attention of DeepSeek-V2 and V3.

    Rotation is half-split here, as for every family. The published weights pair neighbouring features
    (rope_interleave): between the two the rows of q_b_proj (or q_proj) and kv_a_proj_with_mqa that make a rope part
    are reordered, evens first, and nothing else; scores are sums over pairs, so no number of the model changes.
    """

    block: ClassVar[type[Block]] = DeepSeekBlock
