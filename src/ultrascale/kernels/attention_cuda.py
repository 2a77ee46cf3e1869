"""Attention by the FlashAttention-2 kernels that come with PyTorch's CUDA builds."""

from __future__ import annotations

import torch

from ultrascale.kernels import private_torch
from ultrascale.kernels.attention_varlen import Call, VarlenAttention
from ultrascale.kernels.rounds import CAUSAL


class CudaFlashAttention(VarlenAttention):
    """Its backward sums in no fixed order, unless `torch.use_deterministic_algorithms(True)` was called."""

    name = "sdpa"

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = private_torch.cuda_flash_forward(
            q, k, v, call.query_starts, call.key_starts, call.most_queries, call.most_keys, 0.0, call.mask == CAUSAL,
            False, scale=scale, window_size_left=call.mask.left, window_size_right=call.mask.right,
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
        # The state of dropout's random numbers, of which there are none.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = private_torch.cuda_flash_backward(
            dout, q, k, v, out, lse, call.query_starts, call.key_starts, call.most_queries, call.most_keys, 0.0,
            call.mask == CAUSAL, state, unused, scale=scale, window_size_left=call.mask.left,
            window_size_right=call.mask.right,
        )  # fmt: skip
        return dq, dk, dv
