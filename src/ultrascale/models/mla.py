"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, §2.1): queries, keys and values come from narrow latents.

    x ─q_a─ latent ─norm─q_b→ queries of each head: nope | rope
    x ─kv_a─┬ latent ─norm─kv_b→ of each head: key's nope | value
            └ rope: one part of the key, that all heads share

Positions turn the rope parts alone. Trained as here, the latents are expanded, and attention is that of as many key
heads as query heads; a cache for decoding would keep latent and shared key.

Under tp the heads are cut, and what lies before them is not. Under sequence parallelism each rank makes the latents of
its own tokens, and only these narrow tensors are gathered, never the hidden states. Without it every rank makes all
latents, and since each uses them for its own heads, their gradients are summed before they go back through the
replicated weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ultrascale.comm import differentiable
from ultrascale.config.model_section import Model, YarnScaling
from ultrascale.kernels import reference
from ultrascale.models import yarn
from ultrascale.models.sizes import layer_name, window_of
from ultrascale.models.transformer import matrix, norm_weight, output_std, replicated_matrix
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.tensor import ColumnLinear, ReplicatedLinear, RMSNorm, RowLinear

LATENT_EPS = 1e-6
"""Added to the mean square of latents, whatever `rms_norm_eps` is for the residual stream, as in the published code."""


class _SplitHeads(torch.autograd.Function):
    """Projections and shared key → q, k and v of each head: three new tensors, and one for the gradient of each."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        key: torch.Tensor,
        heads: int,
        nope: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [seq, batch, heads · (nope + rope)], kv [seq, batch, heads · (nope + value)], key [seq, batch, rope]"""
        ctx.nope = nope
        ctx.save_for_backward(cos, sin)
        q, kv = q.unflatten(2, (heads, -1)), kv.unflatten(2, (heads, -1))
        turned, k = torch.empty_like(q), torch.empty_like(q)
        turned[..., :nope] = q[..., :nope]
        turned[..., nope:] = reference.rotate(q[..., nope:], cos, sin)
        k[..., :nope] = kv[..., :nope]
        k[..., nope:] = reference.rotate(key.unsqueeze(2), cos, sin)
        # A copy of the values, or attention would keep all of kv for them.
        return turned, k, kv[..., nope:].clone()

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        nope = ctx.nope
        back = torch.empty_like(dq)
        back[..., :nope] = dq[..., :nope]
        back[..., nope:] = reference.rotate(dq[..., nope:], cos, sin, backward=True)
        dkv = torch.cat((dk[..., :nope], dv), dim=-1)
        # The heads' gradients are summed before they are turned back: that is linear, and one head's work.
        shared = dk[..., nope:].sum(dim=2, keepdim=True, dtype=cos.dtype)
        dkey = reference.rotate(shared, cos, sin, backward=True).squeeze(2).to(dk.dtype)
        return back.flatten(2), dkv.flatten(2), dkey, None, None, None, None


class MultiHeadLatentAttention(Module):
    """Attention whose queries, keys and values are made from latents; without q_lora_rank, queries straight from x.

    q_a_proj and kv_a_proj_with_mqa are one GEMM. Selective recomputation keeps what that gives (and queries that have
    no latent), and makes norms, up-projections and attention again: the heads are many times as wide (DeepSeek-V3,
    §3.2.3).
    """

    def __init__(self, build: Build, model: Model, layer: int) -> None:
        super().__init__(build)
        heads, rope, value_dim = model.num_attention_heads, model.qk_rope_head_dim, model.v_head_dim
        nope, q_rank, kv_rank, head_dim = model.qk_nope_head_dim, model.q_lora_rank, model.kv_lora_rank, model.head_dim
        assert rope is not None
        assert value_dim is not None
        assert nope is not None
        assert kv_rank is not None
        assert head_dim == nope + rope
        prefix, hidden, std = f"{layer_name(model, layer)}.attention", model.hidden_size, model.initializer_range
        self.window, self.scale = window_of(model, layer), softmax_scale(model)
        self.local_heads, self.nope = heads // build.tp, nope
        self.widths = [rank for rank in (q_rank, kv_rank, rope) if rank is not None]
        """Of what `down` gives, side by side: latent of the queries, if any, latent of keys and values, shared key."""

        down = [replicated_matrix(f"{prefix}.kv_a_proj_with_mqa.weight", kv_rank + rope, hidden, build, std)]
        self.q_norm: RMSNorm | None = None
        if q_rank is None:
            queries = matrix(f"{prefix}.q_proj.weight", heads * head_dim, hidden, {0: ("tp",)}, std)
        else:
            down.insert(0, replicated_matrix(f"{prefix}.q_a_proj.weight", q_rank, hidden, build, std))
            self.q_norm = RMSNorm(build, norm_weight(f"{prefix}.q_a_layernorm.weight", q_rank, build), LATENT_EPS)
            queries = matrix(f"{prefix}.q_b_proj.weight", heads * head_dim, q_rank, {0: ("tp",)}, std)
        self.queries = ColumnLinear(build, queries)
        self.down = ReplicatedLinear(build, *down)
        self.kv_norm = RMSNorm(build, norm_weight(f"{prefix}.kv_a_layernorm.weight", kv_rank, build), LATENT_EPS)
        self.kv_up = ColumnLinear(
            build, matrix(f"{prefix}.kv_b_proj.weight", heads * (nope + value_dim), kv_rank, {0: ("tp",)}, std)
        )
        self.out = RowLinear(
            build, matrix(f"{prefix}.o_proj.weight", hidden, heads * value_dim, {1: ("tp",)}, output_std(model))
        )

    def forward(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        """x [seq (/ tp), batch, hidden] → the same"""
        *q_latent, latent, key = self.down(x, current).split(self.widths, dim=2)
        q = q_latent[0] if q_latent else self.queries(x, current)
        if self.build.recompute == "selective" and current.sink is not None:
            mixed = checkpoint(self._mix, q, latent, key, current, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._mix(q, latent, key, current)
        return self.out(mixed, current)

    def _mix(self, q: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, current: Pass) -> torch.Tensor:
        """Latents, shared key and queries (or their latent) → what the heads of this rank say.

        q        [seq (/ tp), batch, q_lora_rank], or without it [seq, batch, heads / tp · head_dim]
        latent   [seq (/ tp), batch, kv_lora_rank]
        key      [seq (/ tp), batch, qk_rope_head_dim]
        returns  [seq, batch, heads / tp · v_head_dim]
        """
        assert current.rotation is not None
        if self.q_norm is not None:
            q = self.queries(self.q_norm(q, current), current)
        kv = self.kv_up(self.kv_norm(latent, current), current)
        q, k, v = _SplitHeads.apply(q, kv, self._shared(key), self.local_heads, self.nope, *current.rotation)
        return self.build.attention(q, k, v, current.documents, self.window, self.scale).flatten(2)

    def _shared(self, key: torch.Tensor) -> torch.Tensor:
        """The key's rope part of all tokens, for this rank's heads: its gradient comes in parts, summed over tp."""
        share = differentiable.gather if self.build.sequence_parallel else differentiable.copy_to
        return share(key, self.build.tensor_group)


def softmax_scale(model: Model) -> float:
    """1/√(head size of queries and keys), sharpened where YaRN has mscale_all_dim."""
    assert model.head_dim is not None
    scaling = model.rope_scaling
    return model.head_dim**-0.5 * (yarn.softmax_factor(scaling) if isinstance(scaling, YarnScaling) else 1.0)
