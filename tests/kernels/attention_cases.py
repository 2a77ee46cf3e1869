"""Tiles of every kind, dense attention by autograd, and stand-ins for kernels that need a GPU.

The stand-ins do what FlashAttention's variable-length kernels document, and its C++ does with windows, on any device
and in any dtype, so that all around the kernels is compared with dense attention in float64. What the kernels leave
unwritten is NaN here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from ultrascale.kernels import private_torch
from ultrascale.kernels.attention import AttentionBackend, merge, visible
from ultrascale.kernels.attention_cpu import CpuFlashAttention
from ultrascale.kernels.attention_cuda import CudaFlashAttention
from ultrascale.kernels.attention_flash import FlashAttention
from ultrascale.kernels.attention_reference import ReferenceAttention
from ultrascale.kernels.tiles import Tile
from ultrascale.precision.policy import wide

CPU = torch.device("cpu")
Heads = tuple[int, int, int, int]
"""(heads, kv_heads, head_dim, value_dim)"""


@st.composite
def tiles(draw: st.DrawFn, rows: tuple[int, int] = (0, 1), most: int = 12) -> Tile:
    """One tile; all offsets at which it is empty, cut by the diagonal, by the window, by both, or full."""
    queries, keys = draw(st.integers(1, most)), draw(st.integers(1, most))
    offset = draw(st.integers(-queries - 1, keys + 3))
    window = draw(st.none() | st.integers(1, queries + keys))
    first = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    return Tile(rows, (first[0], first[0] + queries), (first[1], first[1] + keys), offset, window)


@dataclass(frozen=True)
class Case:
    """Tiles of which no two hold the same pair, over queries and keys of some rows."""

    rows: int
    queries: int
    keys: int
    tiles: tuple[Tile, ...]

    def mask(self) -> torch.Tensor:
        """bool [rows, queries, keys]"""
        seen = torch.zeros(self.rows, self.queries, self.keys, dtype=torch.int)
        for tile in self.tiles:
            seen[slice(*tile.rows), slice(*tile.queries), slice(*tile.keys)] += visible(tile, CPU)
        assert int(seen.max()) <= 1
        return seen == 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A grid of rows, queries and keys, cut at random, with a tile in some of its cells."""
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 14), st.integers(1, 14)))
    rows, queries, keys = (
        sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=pieces))})
        for size, pieces in zip(sizes, (1, 2, 2), strict=True)
    )
    window = draw(st.none() | st.integers(1, 3) | st.integers(4, 9))
    found = []
    for row in pairwise(rows):
        for query in pairwise(queries):
            for key in pairwise(keys):
                if draw(st.booleans()):
                    offset = draw(st.integers(-4, key[1] - key[0] + 4))
                    found.append(Tile(row, query, key, offset, window))
    return Case(*sizes, tuple(found))


Tensors = tuple[torch.Tensor, ...]


def draw_tensors(case: Case, heads: Heads, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensors:
    """q, k, v and dout."""
    query_heads, kv_heads, head_dim, value_dim = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (case.queries, case.rows, query_heads, head_dim),
        (case.keys, case.rows, kv_heads, head_dim),
        (case.keys, case.rows, kv_heads, value_dim),
        (case.queries, case.rows, query_heads, value_dim),
    ]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def dense(
    mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, scale: float
) -> Tensors:
    """(out, lse, dq, dk, dv) with all scores and autograd, in float64."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    leaves = [x.requires_grad_() for x in (q.detach().clone(), k.detach().clone(), v.detach().clone())]
    q, k, v = leaves
    copies = q.shape[2] // k.shape[2]
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(copies, 2)) * scale
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    blind = ~mask.any(-1)[:, None, :, None]
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = torch.einsum("bhqk,kbhd->qbhd", weights, v.repeat_interleave(copies, 2))
    gradients = torch.autograd.grad(out, leaves, dout)
    return (out.detach(), scores.logsumexp(-1).permute(2, 0, 1).detach(), *gradients)


def in_parts(backend: AttentionBackend, parts: Sequence[Sequence[Tile]], tensors: Tensors, scale: float) -> Tensors:
    """(out, lse, dq, dk, dv) as a ring computes them: each part's forward joined, backward of each with the whole."""
    q, k, v, dout = tensors
    out, lse = backend.forward(q, k, v, parts[0], scale)
    out, lse = out.to(wide(q.dtype)).contiguous(), lse.contiguous()
    for part in parts[1:]:
        merge(out, lse, *backend.forward(q, k, v, part, scale))
    gradients = [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (q, k, v)]
    for part in parts:
        found = backend.backward(dout, q, k, v, out.to(q.dtype), lse, part, scale)
        for gradient, add in zip(gradients, found, strict=True):
            gradient += add
    return (out, lse, *gradients)


# ---- kernels that need a GPU ------------------------------------------------------------------------------------


def kernel_mask(queries: int, keys: int, left: int, right: int, most_keys: int) -> torch.Tensor:
    """bool [queries, keys] of one sequence of a call, with bounds as FlashAttention-2's C++ reads them."""
    if left >= most_keys:
        left = -1
    if right >= most_keys:
        right = -1
    if left >= 0 and right < 0:
        right = most_keys
    if right >= 0 and left < 0:
        left = most_keys
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return seen if left < 0 and right < 0 else seen & (j >= i - left) & (j <= i + right)


class VarlenKernel:
    """Forward and backward of the packed sequences of one call; counts its calls."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def _sequences(
        self, q: Any, k: Any, v: Any, starts: Sequence[torch.Tensor], most: tuple[int, int], causal: bool,
        window: tuple[int, int],
    ) -> Any:  # fmt: skip
        """(queries, keys, mask) of each sequence, after what the C++ checks."""
        for x, begin in ((q, starts[0]), (k, starts[1]), (v, starts[1])):
            assert x.dim() == 3
            assert x.shape[-1] == q.shape[-1] <= 256
            assert x.shape[-1] % 8 == 0
            assert x.stride(-1) == 1
            assert x.shape[0] == begin[-1]
            assert begin.dtype == torch.int32
        assert q.shape[1] % k.shape[1] == 0
        places = [[slice(*pair) for pair in pairwise(s.tolist())] for s in starts]
        lengths = [[place.stop - place.start for place in of] for of in places]
        assert tuple(map(max, lengths)) == most
        assert causal == (window == (-1, 0))
        for queries, keys in zip(*places, strict=True):
            size = queries.stop - queries.start, keys.stop - keys.start
            yield queries, keys, kernel_mask(*size, *window, most[1])

    def forward(self, q: Any, k: Any, v: Any, starts: Any, most: Any, causal: bool, window: Any, scale: float) -> Any:
        self.forwards += 1
        copies, dtype = q.shape[1] // k.shape[1], q.dtype
        q, k, v = (x.to(wide(dtype)) for x in (q, k, v))
        out = torch.full(q.shape, torch.nan, dtype=dtype)
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=q.dtype)
        for queries, keys, seen in self._sequences(q, k, v, starts, most, causal, window):
            scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys].repeat_interleave(copies, 1)) * scale
            scores = scores.masked_fill(~seen, -torch.inf)
            lse[:, queries] = scores.logsumexp(-1)
            weights = scores.softmax(-1).nan_to_num(0.0)
            out[queries] = torch.einsum("hqk,khd->qhd", weights, v[keys].repeat_interleave(copies, 1))
        return out, lse.masked_fill(lse == -torch.inf, torch.inf)

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, starts: Any, most: Any, causal: bool, window: Any,
        scale: float,
    ) -> Any:  # fmt: skip
        self.backwards += 1
        assert lse.is_contiguous()
        assert lse.shape == (q.shape[1], q.shape[0])
        assert dout.shape == out.shape == q.shape
        copies = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (q, k, v))
        dout, q, k, v, out = (x.to(lse.dtype) for x in (dout, q, k, v, out))
        mean = (dout * out).sum(-1).t()
        for queries, keys, seen in self._sequences(q, k, v, starts, most, causal, window):
            wide_k, wide_v = (x[keys].repeat_interleave(copies, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[queries], wide_k) * scale
            weights = (scores - lse[:, queries, None]).exp().masked_fill(~seen, 0.0)
            dv[keys] = torch.einsum("hqk,qhd->khd", weights, dout[queries]).unflatten(1, (-1, copies)).sum(2)
            dweights = torch.einsum("qhd,khd->hqk", dout[queries], wide_v)
            dscores = weights * (dweights - mean[:, queries, None]) * scale
            dq[queries] = torch.einsum("hqk,khd->qhd", dscores, wide_k)
            dk[keys] = torch.einsum("hqk,qhd->khd", dscores, q[queries]).unflatten(1, (-1, copies)).sum(2)
        return dq, dk, dv


def cuda_on_cpu(kernel: VarlenKernel, monkeypatch: pytest.MonkeyPatch) -> CudaFlashAttention:
    """`sdpa` of CUDA, on a stand-in for PyTorch's two operations."""

    def forward(
        q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, most_q: int, most_k: int, dropout: float, causal: bool,
        debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> Any:  # fmt: skip
        assert (dropout, debug) == (0.0, False)
        window = (window_size_left, window_size_right)
        out, lse = kernel.forward(q, k, v, (starts_q, starts_k), (most_q, most_k), causal, window, scale)
        return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, starts_q: Any, starts_k: Any, most_q: int, most_k: int,
        dropout: float, causal: bool, state: Any, unused: Any, *, scale: float, window_size_left: int,
        window_size_right: int,
    ) -> Any:  # fmt: skip
        assert dropout == 0.0
        window, starts, most = (window_size_left, window_size_right), (starts_q, starts_k), (most_q, most_k)
        return kernel.backward(dout, q, k, v, out, lse, starts, most, causal, window, scale)

    monkeypatch.setattr(private_torch, "cuda_flash_forward", forward)
    monkeypatch.setattr(private_torch, "cuda_flash_backward", backward)
    return CudaFlashAttention()


def flash_on_cpu(kernel: VarlenKernel, monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    """`flash_attn`, on a stand-in for the package, with the arguments of its 2.7 and 2.8."""

    def forward(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
        softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False, block_table: Any = None,
        leftpad_k: Any = None, seqused_k: Any = None, zero_tensors: bool = False,
    ) -> Any:  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        window, starts = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k)
        found = kernel.forward(q, k, v, starts, (max_seqlen_q, max_seqlen_k), causal, window, softmax_scale)
        return (*found, torch.empty(0), torch.empty(2))

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
        cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Any, deterministic: bool,
        rng_state: Any = None, zero_tensors: bool = False,
    ) -> Any:  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, deterministic) == (0.0, 0.0, None, False)
        window, starts = (window_size_left, window_size_right), (cu_seqlens_q, cu_seqlens_k)
        most = (max_seqlen_q, max_seqlen_k)
        parts = kernel.backward(dout, q, k, v, out, softmax_lse, starts, most, causal, window, softmax_scale)
        for buffer, part in zip((dq, dk, dv), parts, strict=True):
            buffer.copy_(part)
        return torch.empty(0)

    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = forward  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    return FlashAttention()


BACKENDS = ("reference", "cpu", "cuda", "flash_attn")


def backend_on_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """One of BACKENDS."""
    if name == "reference":
        return ReferenceAttention()
    if name == "cpu":
        return CpuFlashAttention()
    return (cuda_on_cpu if name == "cuda" else flash_on_cpu)(VarlenKernel(), monkeypatch)
