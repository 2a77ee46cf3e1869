"""Forward and hand-written backward of each reference kernel: autograd's in float64, and the dtype rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.kernels import reference
from ultrascale.models.transformer import _SplitHeads

SHAPES = [(1, 1, 2), (3, 2, 8), (5, 1, 6), (2, 4, 64)]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


# ---- RMS norm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-5, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_and_its_gradients(shape: tuple[int, ...], eps: float) -> None:
    """A large eps too, so that a gradient which leaves it out is seen."""
    x, weight, dy = draw(*shape).requires_grad_(), draw(shape[-1], seed=1).requires_grad_(), draw(*shape, seed=2)
    wanted = F.rms_norm(x, (shape[-1],), weight, eps)
    wanted.backward(dy)
    y, inverse_rms = reference.rms_norm(x.detach(), weight.detach(), eps)
    dx, dweight = reference.rms_norm_backward(dy, x.detach(), weight.detach(), inverse_rms)
    close(y, wanted.detach())
    assert x.grad is not None
    assert weight.grad is not None
    close(dx, x.grad)
    close(dweight, weight.grad)
    assert inverse_rms.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rms_norm_returns_its_inputs_dtype_and_wide_statistics(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, weight, dy = draw(4, 2, 32, dtype=dtype), draw(32, seed=1, dtype=dtype), draw(4, 2, 32, seed=2, dtype=dtype)
    y, inverse_rms = reference.rms_norm(x, weight, 1e-5)
    dx, dweight = reference.rms_norm_backward(dy, x, weight, inverse_rms)
    assert (y.dtype, inverse_rms.dtype, dx.dtype, dweight.dtype) == (dtype, wide, dtype, wide)


def test_rms_norm_of_bfloat16_is_rounded_once() -> None:
    """The mean of many squares, summed in bfloat16, would be off by far more than the last bit."""
    x, weight = draw(2, 1, 4096, dtype=torch.bfloat16), draw(4096, seed=1, dtype=torch.bfloat16)
    y, _ = reference.rms_norm(x, weight, 1e-5)
    exact = F.rms_norm(x.double(), (4096,), weight.double(), 1e-5)
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8).all()
    dy = draw(2, 1, 4096, seed=2, dtype=torch.bfloat16)
    _, inverse_rms = reference.rms_norm(x, weight, 1e-5)
    _, dweight = reference.rms_norm_backward(dy, x, weight, inverse_rms)
    twin = weight.double().requires_grad_()
    F.rms_norm(x.double(), (4096,), twin, 1e-5).backward(dy.double())
    assert twin.grad is not None
    torch.testing.assert_close(dweight.double(), twin.grad, rtol=1e-5, atol=1e-6)


# ---- SwiGLU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_swiglu_and_its_gradient(shape: tuple[int, ...], scale: float) -> None:
    gate_up, dy = (draw(*shape) * scale).requires_grad_(), draw(*shape[:-1], shape[-1] // 2, seed=1)
    gate, up = gate_up.chunk(2, dim=-1)
    wanted = F.silu(gate) * up
    wanted.backward(dy)
    assert gate_up.grad is not None
    close(reference.swiglu(gate_up.detach()), wanted.detach())
    close(reference.swiglu_backward(dy, gate_up.detach()), gate_up.grad)


# ---- rotation ---------------------------------------------------------------------------------------------------


def angles(seq: int, batch: int, half: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    angle = draw(seq, batch, 1, half, seed=7) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_rotation_turns_pairs_half_a_head_apart(seq: int, batch: int, heads: int, half: int) -> None:
    """As complex numbers: (x1 + i·x2)·e^(i·angle). Its transpose, which is the gradient, turns back."""
    x = draw(seq, batch, heads, 2 * half)
    cos, sin = angles(seq, batch, half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)
    y = reference.rotate(x, cos, sin)
    close(y, torch.cat([turned.real, turned.imag], dim=-1))
    close(reference.rotate(y, cos, sin, backward=True), x)


def test_the_gradient_of_a_rotation_is_autograds() -> None:
    x, dy = draw(4, 2, 3, 8).requires_grad_(), draw(4, 2, 3, 8, seed=1)
    cos, sin = angles(4, 2, 4)
    x1, x2 = x.chunk(2, dim=-1)
    torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).backward(dy)
    assert x.grad is not None
    close(reference.rotate(dy, cos, sin, backward=True), x.grad)


def test_splitting_a_fused_qkv_has_autograds_gradient() -> None:
    heads, kv_heads, head_dim = 4, 2, 6
    qkv = draw(5, 2, (heads + 2 * kv_heads) * head_dim).requires_grad_()
    twin = qkv.detach().clone().requires_grad_()
    cos, sin = angles(5, 2, head_dim // 2)
    parts = _SplitHeads.apply(qkv, heads, kv_heads, cos, sin)
    q, k, v = twin.view(5, 2, -1, head_dim).split([heads, kv_heads, kv_heads], dim=2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)

    wanted = (turned(q), turned(k), v)
    gradients = [draw(*part.shape, seed=number) for number, part in enumerate(parts)]
    for part, expected in zip(parts, wanted, strict=True):
        close(part.detach(), expected.detach())
    torch.autograd.backward(parts, gradients)
    torch.autograd.backward(wanted, gradients)
    assert qkv.grad is not None
    assert twin.grad is not None
    close(qkv.grad, twin.grad)


# ---- dtypes -----------------------------------------------------------------------------------------------------

ROUNDED: dict[str, Callable[[torch.dtype], list[torch.Tensor]]] = {
    "swiglu": lambda dtype: [
        reference.swiglu(draw(4, 8, dtype=dtype)),
        reference.swiglu_backward(draw(4, 4, dtype=dtype), draw(4, 8, dtype=dtype)),
    ],
    "rotate": lambda dtype: [
        reference.rotate(draw(4, 2, 3, 8, dtype=dtype), *angles(4, 2, 4, torch.float32)),
        reference.rotate(draw(4, 2, 3, 8, dtype=dtype), *angles(4, 2, 4, torch.float32), backward=True),
    ],
}


@pytest.mark.parametrize("kernel", ROUNDED)
def test_bfloat16_in_is_bfloat16_out(kernel: str) -> None:
    assert {out.dtype for out in ROUNDED[kernel](torch.bfloat16)} == {torch.bfloat16}


def test_a_rotation_of_bfloat16_is_rounded_once() -> None:
    """Angles and products in float32: the products rounded to bfloat16 first would be off by up to a bit more."""
    x = draw(64, 2, 3, 8, dtype=torch.bfloat16)
    cos, sin = angles(64, 2, 4, torch.float32)
    exact = reference.rotate(x.double(), cos.double(), sin.double())
    once = exact.float().bfloat16()
    y = reference.rotate(x, cos, sin)
    assert (y != once).float().mean() < 1e-3  # the rare tie that float32 decides otherwise
