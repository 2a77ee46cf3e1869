"""Blocks of decoder-only transformers: attention, SwiGLU, and the two in one."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ultrascale.config.model_section import Model
from ultrascale.kernels import reference
from ultrascale.models.sizes import layer_name, window_of
from ultrascale.parallel.layout import Constant, Kind, Layout, Normal, Use
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.tensor import ColumnLinear, RMSNorm, RowLinear, swiglu


def matrix(name: str, rows: int, columns: int, split: dict[int, tuple[str, ...]], std: float) -> Layout:
    """A weight that works on this rank's own features."""
    return Layout(
        name=name,
        shape=(rows, columns),
        split=split,
        used_in=Use.FEATURES,
        tie=None,
        init=Normal(std),
        decay=True,
        lr_scale=1.0,
        pad_to={},
        kind=Kind.MATRIX,
    )


def replicated_matrix(name: str, rows: int, columns: int, build: Build, std: float) -> Layout:
    """A weight that every tp rank holds: on whole tokens, which are this rank's own under sequence parallelism."""
    return Layout(
        name=name,
        shape=(rows, columns),
        split={},
        used_in=Use.TOKENS if build.sequence_parallel else Use.WHOLE,
        tie=None,
        init=Normal(std),
        decay=True,
        lr_scale=1.0,
        pad_to={},
        kind=Kind.MATRIX,
    )


def norm_weight(name: str, size: int, build: Build) -> Layout:
    """A norm's weight: on whole tokens, which are this rank's own under sequence parallelism."""
    return Layout(
        name=name,
        shape=(size,),
        split={},
        used_in=Use.TOKENS if build.sequence_parallel else Use.WHOLE,
        tie=None,
        init=Constant(1.0),
        decay=False,
        lr_scale=1.0,
        pad_to={},
        kind=Kind.NORM,
    )


def output_std(model: Model) -> float:
    """Std of the weights that write into the residual stream; 1/√(2L) of the others' when scaled by depth (GPT-2)."""
    return (
        model.initializer_range / (2 * model.num_hidden_layers) ** 0.5
        if model.depth_scaled_init
        else model.initializer_range
    )


class _SplitHeads(torch.autograd.Function):
    """qkv → q and k rotated, v: one new tensor for q and k, none for v, and one for the gradient of all three."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, heads: int, kv_heads: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.heads, ctx.kv_heads = heads, kv_heads
        ctx.save_for_backward(cos, sin)
        by_head = qkv.view(*qkv.shape[:-1], heads + 2 * kv_heads, -1)
        rotated = reference.rotate(by_head[:, :, : heads + kv_heads], cos, sin)
        return rotated[:, :, :heads], rotated[:, :, heads:], by_head[:, :, heads + kv_heads :].clone()

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        heads, kv_heads = ctx.heads, ctx.kv_heads
        seq, batch, _, head_dim = dq.shape
        dqkv = dq.new_empty(seq, batch, heads + 2 * kv_heads, head_dim)
        dqkv[:, :, :heads] = reference.rotate(dq, cos, sin, backward=True)
        dqkv[:, :, heads : heads + kv_heads] = reference.rotate(dk, cos, sin, backward=True)
        dqkv[:, :, heads + kv_heads :] = dv
        return dqkv.flatten(2), None, None, None, None


class AttentionLayer(Protocol):
    """What a block asks of its attention, whatever kind that is."""

    def __init__(self, build: Build, model: Model, layer: int) -> None: ...

    def __call__(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        """x [seq (/ tp), batch, hidden] → the same"""


class Attention(Module):
    """Grouped-query attention with rotary positions; q, k and v are one GEMM."""

    def __init__(self, build: Build, model: Model, layer: int) -> None:
        super().__init__(build)
        prefix = f"{layer_name(model, layer)}.attention"
        self.window = window_of(model, layer)
        heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        assert kv_heads is not None
        assert head_dim is not None
        hidden, std = model.hidden_size, model.initializer_range
        # With more tp ranks than kv heads, a head is held by kv_replica ranks, whose gradients of it are parts.
        kv_split: dict[int, tuple[str, ...]] = {0: ("kv_shard",)}
        self.qkv = ColumnLinear(
            build,
            matrix(f"{prefix}.q_proj.weight", heads * head_dim, hidden, {0: ("tp",)}, std),
            matrix(f"{prefix}.k_proj.weight", kv_heads * head_dim, hidden, kv_split, std),
            matrix(f"{prefix}.v_proj.weight", kv_heads * head_dim, hidden, kv_split, std),
        )
        self.out = RowLinear(
            build,
            matrix(f"{prefix}.o_proj.weight", hidden, heads * head_dim, {1: ("tp",)}, output_std(model)),
        )
        self.local_heads = heads // build.tp
        self.local_kv_heads = kv_heads // build.mesh.size(("kv_shard",))

    def forward(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        """x [seq (/ tp), batch, hidden] → the same"""
        qkv = self.qkv(x, current)
        if self.build.recompute == "selective" and current.sink is not None:
            mixed = checkpoint(self._mix, qkv, current, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._mix(qkv, current)
        return self.out(mixed, current)

    def _mix(self, qkv: torch.Tensor, current: Pass) -> torch.Tensor:
        """qkv [seq, batch, (heads + 2 kv_heads) / tp · head_dim] → [seq, batch, heads / tp · head_dim]"""
        q, k, v = self._heads(qkv, current)
        return self.build.attention(q, k, v, current.documents, self.window).flatten(2)

    def _heads(self, qkv: torch.Tensor, current: Pass) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [seq, batch, heads / tp, head_dim] and k, v [seq, batch, kv_heads / tp, head_dim], q and k rotated."""
        assert current.rotation is not None
        return _SplitHeads.apply(qkv, self.local_heads, self.local_kv_heads, *current.rotation)


class MLP(Module):
    """SwiGLU; gate and up are one GEMM."""

    def __init__(self, build: Build, model: Model, prefix: str, ffn: int) -> None:
        super().__init__(build)
        hidden, std = model.hidden_size, model.initializer_range
        self.gate_up = ColumnLinear(
            build,
            matrix(f"{prefix}.gate_proj.weight", ffn, hidden, {0: ("tp",)}, std),
            matrix(f"{prefix}.up_proj.weight", ffn, hidden, {0: ("tp",)}, std),
        )
        self.down = RowLinear(build, matrix(f"{prefix}.down_proj.weight", hidden, ffn, {1: ("tp",)}, output_std(model)))

    def forward(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        """x [seq (/ tp), batch, hidden] → the same"""
        gate_up = self.gate_up(x, current)
        if self.build.recompute == "selective" and current.sink is not None:
            product = checkpoint(swiglu, gate_up, use_reentrant=False, preserve_rng_state=False)
        else:
            product = swiglu(gate_up)
        return self.down(product, current)


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention_class: ClassVar[type[AttentionLayer]] = Attention

    def __init__(self, build: Build, model: Model, index: int) -> None:
        super().__init__(build)
        prefix, hidden, eps = layer_name(model, index), model.hidden_size, model.rms_norm_eps
        self.attention_norm = RMSNorm(build, norm_weight(f"{prefix}.attention_norm.weight", hidden, build), eps)
        self.attention = self.attention_class(build, model, index)
        self.mlp_norm = RMSNorm(build, norm_weight(f"{prefix}.mlp_norm.weight", hidden, build), eps)
        self.mlp = self._feed_forward(build, model, index)

    def _feed_forward(self, build: Build, model: Model, index: int) -> nn.Module:
        return MLP(build, model, f"{layer_name(model, index)}.mlp", model.intermediate_size)

    def forward(self, x: torch.Tensor, current: Pass) -> Any:
        """x [seq (/ tp), batch, hidden] → the same"""
        x = x + self.attention(self.attention_norm(x, current), current)
        return x + self.mlp(self.mlp_norm(x, current), current)
