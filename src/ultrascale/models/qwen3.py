"""Qwen3, dense: Llama whose queries and keys are normed per head before they are turned (Yang et al. 2025, §2)."""

from __future__ import annotations

from typing import ClassVar

import torch

from ultrascale.config.model_section import Model
from ultrascale.models.llama import Llama
from ultrascale.models.sizes import Sizes, layer_name
from ultrascale.models.transformer import Attention, AttentionLayer, Block
from ultrascale.parallel.layout import Constant, Kind, Layout, Use
from ultrascale.parallel.module import Build
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.tensor import RMSNorm, rotate


def head_norm(name: str, head_dim: int) -> Layout:
    """A norm's weight that every head is multiplied with: each tp rank holds it, and uses it on its own heads."""
    return Layout(
        name=name,
        shape=(head_dim,),
        split={},
        used_in=Use.FEATURES,
        tie=None,
        init=Constant(1.0),
        decay=False,
        lr_scale=1.0,
        pad_to={},
        kind=Kind.NORM,
    )


class NormedAttention(Attention):
    """Attention with RMS norms over the head dim of queries and keys, one weight for all heads of a layer."""

    def __init__(self, build: Build, model: Model, layer: int) -> None:
        super().__init__(build, model, layer)
        assert model.head_dim is not None
        prefix, eps = f"{layer_name(model, layer)}.attention", model.rms_norm_eps
        self.q_norm = RMSNorm(build, head_norm(f"{prefix}.q_norm.weight", model.head_dim), eps)
        self.k_norm = RMSNorm(build, head_norm(f"{prefix}.k_norm.weight", model.head_dim), eps)

    def _heads(self, qkv: torch.Tensor, current: Pass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert current.rotation is not None
        heads, kv_heads = self.local_heads, self.local_kv_heads
        by_head = qkv.unflatten(2, (heads + 2 * kv_heads, -1))
        q, k, v = by_head.split([heads, kv_heads, kv_heads], dim=2)
        q, k = self.q_norm(q, current), self.k_norm(k, current)
        return rotate(q, *current.rotation), rotate(k, *current.rotation), v


class Qwen3Block(Block):
    attention_class: ClassVar[type[AttentionLayer]] = NormedAttention


class Qwen3(Llama):
    """The dense models of the Qwen3 family."""

    block: ClassVar[type[Block]] = Qwen3Block

    def sizes(self) -> Sizes:
        return super().sizes().plus_norms(self.config.model, head_norm_parameters(self.config.model))


def head_norm_parameters(model: Model) -> int:
    """Of a layer: one weight for queries and one for keys."""
    assert model.head_dim is not None
    return 2 * model.head_dim
