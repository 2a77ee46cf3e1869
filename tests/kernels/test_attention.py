"""Every attention backend is dense attention, forward and backward, whole or joined from parts."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from attention_cases import (
    BACKENDS,
    Case,
    Heads,
    VarlenKernel,
    backend_on_cpu,
    cases,
    cuda_on_cpu,
    dense,
    draw_tensors,
    flash_on_cpu,
    in_parts,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.kernels.attention import AttentionBackend, merge
from ultrascale.kernels.attention_cpu import CpuFlashAttention
from ultrascale.kernels.attention_cuda import CudaFlashAttention
from ultrascale.kernels.attention_flash import FlashAttention
from ultrascale.kernels.attention_reference import ReferenceAttention
from ultrascale.kernels.tiles import Tile

HEADS: list[Heads] = [(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 6, 6), (2, 1, 12, 8), (2, 2, 4, 10)]
SCALE = 0.3
NAMES = ("out", "lse", "dq", "dk", "dv")


def close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], tolerance: float = 1e-12) -> None:
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(case=cases(), heads=st.sampled_from(HEADS), parts=st.integers(1, 3), seed=st.integers(0, 99))
def test_attention_over_tiles_is_dense_attention(name: str, case: Case, heads: Heads, parts: int, seed: int) -> None:
    """In several calls too, as a ring makes them; queries that see nothing give 0 and −∞, and no gradient."""
    tensors = draw_tensors(case, heads, seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        backend = backend_on_cpu(name, monkeypatch)
        split = [case.tiles[part::parts] for part in range(parts)]
        close(in_parts(backend, split, tensors, SCALE), dense(case.mask(), *tensors, SCALE))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", BACKENDS)
def test_long_sequences_are_dense_attention(name: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the pieces in which the CPU's kernel and the windows are cut."""
    case = Case(2, 70, 70, (Tile((0, 2), (0, 70), (0, 70), 0, window),))
    tensors = draw_tensors(case, (4, 2, 8, 8))
    backend = backend_on_cpu(name, monkeypatch)
    close(in_parts(backend, [case.tiles], tensors, SCALE), dense(case.mask(), *tensors, SCALE))


@pytest.mark.parametrize(("offset", "window"), [(-2, 3), (-2, None), (3, 2), (-9, None), (20, 4)])
@pytest.mark.parametrize("name", BACKENDS)
def test_queries_that_see_no_key_are_no_key_of_logit_0(
    name: str, offset: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, at the end, or all of a tile, alone and joined to a part in which they see some."""
    case = Case(2, 9, 10, (Tile((0, 2), (0, 9), (0, 4), offset, window), Tile((0, 2), (0, 9), (4, 10), 8, None)))
    tensors = draw_tensors(case, (2, 1, 8, 8))
    backend = backend_on_cpu(name, monkeypatch)
    alone = Case(2, 9, 10, case.tiles[:1])
    wanted = dense(alone.mask(), *tensors, SCALE)
    assert bool((wanted[1] == -torch.inf).any())
    close(in_parts(backend, [alone.tiles], tensors, SCALE), wanted)
    joined = dense(case.mask(), *tensors, SCALE)
    close(in_parts(backend, [case.tiles[:1], case.tiles[1:]], tensors, SCALE), joined)


@pytest.mark.parametrize("name", BACKENDS)
def test_large_logits_overflow_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of ±10⁴: e^10⁴ is no number; parts whose log-sum-exp lie that far apart join."""
    case = Case(1, 4, 6, (Tile((0, 1), (0, 4), (0, 3), 5, None), Tile((0, 1), (0, 4), (3, 6), 2, None)))
    q, k, v, dout = draw_tensors(case, (1, 1, 8, 8))
    tensors = (q * 100, k * 100, v, dout)
    backend = backend_on_cpu(name, monkeypatch)
    found = in_parts(backend, [case.tiles[:1], case.tiles[1:]], tensors, SCALE)
    close(found, dense(case.mask(), *tensors, SCALE), 1e-10)


@pytest.mark.parametrize("make", [cuda_on_cpu, flash_on_cpu])
def test_documents_of_all_rows_are_one_call_each_way(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = VarlenKernel()
    backend = (cuda_on_cpu if make is cuda_on_cpu else flash_on_cpu)(kernel, monkeypatch)
    rows = [(0, 5, 6, 13, 16), (0, 16), (0, 1, 2, 16)]
    tiles = [
        Tile((row, row + 1), place, place, 0, None) for row, starts in enumerate(rows) for place in pairwise(starts)
    ]
    case = Case(3, 16, 16, tuple(tiles))
    tensors = draw_tensors(case, (4, 2, 8, 8))
    close(in_parts(backend, [case.tiles], tensors, SCALE), dense(case.mask(), *tensors, SCALE))
    assert (kernel.forwards, kernel.backwards) == (1, 1)


@pytest.mark.parametrize("make", [cuda_on_cpu, flash_on_cpu])
def test_one_row_in_order_is_not_copied(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed queries and keys are then views of what was handed in."""
    kernel = VarlenKernel()
    seen: list[int] = []
    forward = kernel.forward

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> object:
        seen.extend(x.untyped_storage().data_ptr() for x in (q, k, v))
        return forward(q, k, v, *rest)

    monkeypatch.setattr(kernel, "forward", watched)
    backend = (cuda_on_cpu if make is cuda_on_cpu else flash_on_cpu)(kernel, monkeypatch)
    case = Case(1, 12, 12, (Tile((0, 1), (0, 7), (0, 7), 0, None), Tile((0, 1), (7, 12), (7, 12), 0, None)))
    q, k, v, _ = draw_tensors(case, (4, 2, 8, 8))
    backend.forward(q, k, v, case.tiles, SCALE)
    assert seen == [x.untyped_storage().data_ptr() for x in (q, k, v)]


def test_joining_parts_that_saw_nothing_changes_nothing() -> None:
    out, lse = torch.zeros(3, 2, dtype=torch.float64), torch.tensor([-torch.inf, 1.5, -torch.inf], dtype=torch.float64)
    out[1] = 7.0
    part, part_lse = torch.full((3, 2), 3.0, dtype=torch.float64), torch.tensor([-torch.inf, -torch.inf, 0.25])
    merge(out, lse, part, part_lse.double())
    assert lse.tolist() == [-torch.inf, 1.5, 0.25]
    assert out.tolist() == [[0.0, 0.0], [7.0, 7.0], [3.0, 3.0]]


# ---- bfloat16 ---------------------------------------------------------------------------------------------------

ROUNDING = 2.0**-9
"""Half a unit in the last place of bfloat16, of 8 significant bits."""


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("backend", [ReferenceAttention(), CpuFlashAttention()], ids=["reference", "cpu"])
def test_bfloat16_attention_is_as_exact_as_its_numbers(backend: ReferenceAttention | CpuFlashAttention) -> None:
    """Against float64 on the same rounded inputs. A product sums in float32; before it and at the end numbers are
    rounded: probabilities and output in forward; in backward also the output that comes in, the gradient of the scores,
    and what comes out. So an output has two roundings, a gradient at most four, each of at most ROUNDING."""
    case = Case(2, 40, 40, (Tile((0, 2), (0, 40), (0, 40), 0, None),))
    tensors = draw_tensors(case, (4, 2, 16, 16), dtype=torch.bfloat16)
    wanted = dense(case.mask(), *tensors, 0.25)
    out, lse = backend.forward(*tensors[:3], case.tiles, 0.25)
    assert lse.dtype == torch.float32
    assert relative(out, wanted[0]) <= 2 * ROUNDING
    assert float((lse.double() - wanted[1]).abs().max()) <= 1e-4  # float32 throughout
    gradients = backend.backward(tensors[3], *tensors[:3], out.bfloat16(), lse, case.tiles, 0.25)
    for name, found, exact in zip(NAMES[2:], gradients, wanted[2:], strict=True):
        assert relative(found, exact) <= 4 * ROUNDING, name


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_are_as_wide_as_the_queries_and_sums_are_wide(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_on_cpu(name, monkeypatch)
    case = Case(2, 6, 6, (Tile((0, 2), (0, 6), (0, 6), 0, None),))
    q, k, v, dout = draw_tensors(case, (4, 2, 8, 8), dtype=dtype)
    out, lse = backend.forward(q, k, v, case.tiles, SCALE)
    assert out.dtype in (dtype, torch.float32)
    assert lse.dtype == torch.float32
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    for gradient, x in zip(backend.backward(dout, q, k, v, out, lse, case.tiles, SCALE), (q, k, v), strict=True):
        assert gradient.dtype in (dtype, torch.float32)
        assert gradient.shape == x.shape


# ---- the kernels themselves ------------------------------------------------------------------------------------


def test_pytorchs_cuda_operations_take_our_arguments_and_return_what_we_read() -> None:
    """On meta tensors, for which PyTorch computes shapes and dtypes alone: [heads, queries] is the log-sum-exp."""
    tiles = [Tile((0, 2), (0, 9), (0, 9), 0, 4), Tile((0, 1), (9, 20), (2, 9), 30, None)]
    q, k, v, dout = (
        torch.empty(20, 2, heads, dim, dtype=torch.bfloat16, device="meta")
        for heads, dim in ((4, 12), (2, 12), (2, 6), (4, 6))
    )
    backend = CudaFlashAttention()
    out, lse = backend.forward(q, k, v, tiles, SCALE)
    assert (out.shape, out.dtype) == (dout.shape, torch.float32)
    assert (lse.shape, lse.dtype) == ((20, 2, 4), torch.float32)
    for gradient, x in zip(backend.backward(dout, q, k, v, out, lse, tiles, SCALE), (q, k, v), strict=True):
        assert gradient.shape == x.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(max_examples=60, deadline=None)
@given(case=cases(), heads=st.sampled_from(HEADS), parts=st.integers(1, 3))
def test_attention_on_a_gpu_is_dense_attention(case: Case, heads: Heads, parts: int) -> None:
    """In bfloat16; see above for the roundings, to which each part adds that of its output, and of its gradients."""
    tensors = draw_tensors(case, heads, dtype=torch.bfloat16)
    wanted = dense(case.mask(), *tensors, SCALE)
    split = [case.tiles[part::parts] for part in range(parts)]
    backends: list[AttentionBackend] = [CudaFlashAttention()]
    if find_spec("flash_attn"):
        backends.append(FlashAttention())
    for backend in backends:
        out, lse, *gradients = in_parts(backend, split, tuple(x.cuda() for x in tensors), SCALE)
        torch.testing.assert_close(lse.double().cpu(), wanted[1], rtol=1e-3, atol=1e-3)
        for name, found, exact in zip(("out", *NAMES[2:]), (out, *gradients), (wanted[0], *wanted[2:]), strict=True):
            apart = float((found.double().cpu() - exact).norm())
            assert apart <= (4 + 2 * parts) * ROUNDING * float(exact.norm()) + 1e-6, (backend.name, name)
