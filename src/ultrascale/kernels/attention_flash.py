"""Attention by the flash-attn package, 2.7 and later: kernels as those in PyTorch, ahead of its releases (Dao 2023)."""

from __future__ import annotations

import torch

from ultrascale.kernels.attention_varlen import Call, VarlenAttention
from ultrascale.kernels.rounds import CAUSAL


class FlashAttention(VarlenAttention):
    """Its backward sums in no fixed order, unless `torch.use_deterministic_algorithms(True)` was called."""

    name = "flash_attn"

    def __init__(self) -> None:
        # Its public functions return the log-sum-exp of forward, and take none in backward.
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

        self._forward, self._backward = _flash_attn_varlen_forward, _flash_attn_varlen_backward

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._forward(
            q, k, v, call.query_starts, call.key_starts, call.most_queries, call.most_keys,
            dropout_p=0.0, softmax_scale=scale, causal=call.mask == CAUSAL,
            window_size_left=call.mask.left, window_size_right=call.mask.right, softcap=0.0,
            alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return out, lse

    def call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: Call,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self._backward(
            dout, q, k, v, out, lse, dq, dk, dv, call.query_starts, call.key_starts, call.most_queries, call.most_keys,
            dropout_p=0.0, softmax_scale=scale, causal=call.mask == CAUSAL,
            window_size_left=call.mask.left, window_size_right=call.mask.right, softcap=0.0,
            alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv
