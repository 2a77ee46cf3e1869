"""Plain PyTorch forms of the operations that have fused kernels elsewhere: the definition the fused ones are held to.

Each operation is a pair of functions, forward and backward, on plain tensors; the autograd Functions that use them
live with the layers, since weight gradients go to the gradient sink. Statistics are computed in max(float32, dtype).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ultrascale.precision.policy import wide


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y = x / rms(x) · weight over the last dim (Zhang and Sennrich 2019).

    x        [..., hidden]
    returns  y as x, and 1/rms [..., 1] in wide precision, kept for backward
    """
    x_wide = x.to(wide(x.dtype))
    mean_square = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    inverse_rms = mean_square.add_(eps).rsqrt_()
    y = (x_wide * inverse_rms).mul_(weight)
    return y.to(x.dtype), inverse_rms


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx as x, dweight [hidden] in wide precision)."""
    dtype = inverse_rms.dtype
    weight_wide = weight.to(dtype)
    normal = x.to(dtype) * inverse_rms
    dy_wide = dy.to(dtype)
    product = dy_wide * normal
    dweight = product.flatten(0, -2).sum(dim=0)
    projection = product.matmul(weight_wide).unsqueeze(-1).div_(x.shape[-1])
    dx = torch.addcmul(dy_wide * weight_wide, normal, projection, value=-1.0).mul_(inverse_rms)
    return dx.to(x.dtype), dweight


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up (Shazeer 2020).

    gate_up  [..., 2 · ffn]: the gate's features, then the up projection's
    returns  [..., ffn]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Gradient of `gate_up` [..., 2 · ffn]."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    dgate, dup = out.chunk(2, dim=-1)
    torch.mul(dy, F.silu(gate), out=dup)
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool = False) -> torch.Tensor:
    """Rotary embedding in the half-split convention of Hugging Face's Llama (Su et al. 2021).

    x         [seq, batch, heads, head_dim]
    cos, sin  [seq, batch, 1, head_dim / 2] in wide precision
    backward  rotates the other way: the transpose, which is the gradient
    """
    x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
    if backward:
        sin = -sin
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    out[..., :half] = torch.addcmul(x1 * cos, x2, sin, value=-1.0)
    out[..., half:] = torch.addcmul(x2 * cos, x1, sin)
    return out
