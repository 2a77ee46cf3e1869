"""Products of groups of rows, each with a matrix of its own: the experts of a mixture in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ultrascale.kernels.private_torch import GROUPED_DTYPES, grouped_mm


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """y[i] = x[i] @ weight[g].T for the rows i of group g.

    x        [rows, in], the rows of group 0 first
    weight   [groups, out, in]
    counts   rows of each group; 0 is a number too
    returns  [rows, out]
    """
    return _grouped(x, weight.transpose(1, 2), counts)


def grouped_linear_backward(dy: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """dx[i] = dy[i] @ weight[g]; dy [rows, out] → [rows, in]. Weight gradients are products of the slices."""
    return _grouped(dy, weight, counts)


def _grouped(x: torch.Tensor, matrices: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """x[i] @ matrices[g]; matrices [groups, in, out]."""
    if x.device.type == "cuda" and x.dtype in GROUPED_DTYPES:
        ends = torch.tensor(counts, dtype=torch.int32, device=x.device).cumsum(0, dtype=torch.int32)
        return grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(x.shape[0], matrices.shape[2])
    for part, rows, matrix in zip(out.split(list(counts)), x.split(list(counts)), matrices, strict=True):
        torch.mm(rows, matrix, out=part)
    return out
