"""What a layer must know about the pass it is part of: whose gradients it makes, and which rotations apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class WeightGradient(Protocol):
    """The part of a layer's backward that nothing but the optimizer waits for: it may run later than the rest."""

    def issue(self) -> None:
        """Starts the communication that it needs, if any. May be called more than once, or never."""

    def run(self) -> None:
        """Computes the gradient and hands it to `accumulate*`."""


class GradientSink(Protocol):
    """Where every weight gradient goes (`parallel/gradients.py`)."""

    def defers(self, stage: int, micro_batch: int) -> bool:
        """Whether the backward of this pass is split: what is handed to `defer` runs later."""

    def defer(self, work: WeightGradient, stage: int, micro_batch: int) -> None:
        """Runs `work` in its turn: at once, or with the weight-gradient action of a split backward."""

    def accumulate(self, parameter: torch.Tensor, gradient: torch.Tensor, stage: int, micro_batch: int) -> None:
        """Adds `gradient` (any dtype, the parameter's local shape)."""

    def accumulate_product(
        self, parameter: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, stage: int, micro_batch: int
    ) -> None:
        """Adds dyᵀ·x: dy [tokens, out], x [tokens, in], parameter [out, in]; a narrower dy means its first rows."""

    def accumulate_rows(
        self,
        parameter: torch.Tensor,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        stage: int,
        micro_batch: int,
    ) -> None:
        """Adds gradient[i] to row rows[i]: rows int64 [tokens], gradient [tokens, in]."""

    def unit_done(self, unit: str, stage: int, micro_batch: int) -> None:
        """Says that the unit's backward of this micro-batch has made, or deferred, all its weight gradients."""


@dataclass(slots=True)
class Pass:
    """One micro-batch's way through one stage: forward, its recomputation, and backward share it."""

    stage: int
    micro_batch: int
    sink: GradientSink | None
    """None in evaluation: there is no backward."""
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    """cos and sin [seq, batch, 1, head_dim / 2] of this micro-batch's positions, made once per pass."""

    @property
    def splits_backward(self) -> bool:
        """Whether this pass is in a backward whose weight gradients run later."""
        return self.sink is not None and self.sink.defers(self.stage, self.micro_batch)


class _UnitInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: str, current: Pass) -> torch.Tensor:
        ctx.unit, ctx.current = unit, current
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        current = ctx.current
        current.sink.unit_done(ctx.unit, current.stage, current.micro_batch)
        return dx, None, None


def unit_input(x: torch.Tensor, unit: str, current: Pass) -> torch.Tensor:
    """Identity at a unit's entrance: its backward runs when everything behind it in the unit has run."""
    if current.sink is None or not x.requires_grad:
        return x
    return _UnitInput.apply(x, unit, current)
