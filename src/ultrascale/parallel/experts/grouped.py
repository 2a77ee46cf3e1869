"""The matrices of this rank's experts, each applied to its own rows; weight gradients go to the sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ultrascale.kernels.grouped_gemm import grouped_linear, grouped_linear_backward
from ultrascale.parallel.layout import Layout
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass


@dataclass(frozen=True, slots=True)
class _GroupedGradient:
    """dW[g] = dyᵀ·x over the rows of each expert, of one micro-batch."""

    weight: torch.Tensor
    dy: torch.Tensor
    x: torch.Tensor
    counts: list[int]
    current: Pass

    def issue(self) -> None:
        pass

    def run(self) -> None:
        current = self.current
        assert current.sink is not None
        current.sink.accumulate_products(self.weight, self.dy, self.x, self.counts, current.stage, current.micro_batch)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: list[int], current: Pass) -> torch.Tensor:
        ctx.weight, ctx.counts, ctx.current = weight, counts, current
        ctx.save_for_backward(x)
        return grouped_linear(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        current: Pass = ctx.current
        assert current.sink is not None
        work = _GroupedGradient(ctx.weight, dy, x, ctx.counts, current)
        current.sink.defer(work, current.stage, current.micro_batch)
        return grouped_linear_backward(dy, ctx.weight, ctx.counts), None, None, None


class GroupedLinear(Module):
    """One matrix of every expert: weight [experts here, out, in], a part of one logical [experts, out, in]."""

    weight: torch.Tensor

    def __init__(self, build: Build, layout: Layout) -> None:
        super().__init__(build)
        self.declare("weight", layout)

    def forward(self, x: torch.Tensor, counts: list[int], current: Pass) -> torch.Tensor:
        """x [rows, in], the rows of each expert together → [rows, out]"""
        return _Grouped.apply(x, self.weight, counts, current)
