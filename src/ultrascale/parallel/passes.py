"""What a layer must know about the pass it is part of: whose gradients it makes, and which rotations apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from ultrascale.parallel.experts.load import ExpertLoad


class WeightGradient(Protocol):
    """The part of a layer's backward that nothing but the optimizer waits for: it may run later than the rest."""

    def issue(self) -> None:
        """Starts the communication that it needs, if any. May be called more than once, or never."""

    def run(self) -> None:
        """Computes the gradient and hands it to `accumulate*`."""


class Visit(NamedTuple):
    """One micro-batch's way through one unit, in one direction."""

    stage: int
    micro_batch: int
    unit: str
    backward: bool


class UnitWeights(Protocol):
    """Where replicas share out their parameters: who has them there in time (`parallel/weights.py`)."""

    def enter(self, visit: Visit) -> None:
        """Before a unit's forward or backward: its weights are there when this returns."""

    def leave(self, visit: Visit) -> None:
        """Behind it: this visit needs them no more."""


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

    def accumulate_products(
        self,
        parameter: torch.Tensor,
        dy: torch.Tensor,
        x: torch.Tensor,
        counts: Sequence[int],
        stage: int,
        micro_batch: int,
    ) -> None:
        """Adds dy[g]ᵀ·x[g] to parameter[g] for each group of rows: dy [rows, out], x [rows, in], counts [groups]."""

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
    weights: UnitWeights | None = None
    """None where every rank holds all of its parameters all the time."""
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    """cos and sin [seq, batch, 1, head_dim / 2] of this micro-batch's positions, made once per pass."""
    documents: tuple[tuple[int, ...], ...] | None = None
    """Where the documents of each row begin; None: attention goes over whole rows."""
    real: torch.Tensor | None = None
    """bool [seq, batch]: whether a token is text; None: all are."""
    lengths: torch.Tensor | None = None
    """int64 [batch], with `real`: tokens of text of each whole row."""
    places: torch.Tensor | None = None
    """int64 [seq, batch]: where in its whole sequence each token is; None: the sequence is here, in order."""
    samples: torch.Tensor | None = None
    """int64 [batch]: each row's number among the samples of the run; None: it is none of them."""
    load: ExpertLoad | None = None
    """Where routers say how many tokens each expert got; None: nobody asks."""

    def visit(self, unit: str, backward: bool) -> Visit:
        """This pass in one unit."""
        return Visit(self.stage, self.micro_batch, unit, backward)

    @property
    def splits_backward(self) -> bool:
        """Whether this pass is in a backward whose weight gradients run later."""
        return self.sink is not None and self.sink.defers(self.stage, self.micro_batch)


class _Entrance(torch.autograd.Function):
    """Identity at a unit's entrance: its backward runs when everything behind it in the unit has run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: str, current: Pass) -> torch.Tensor:
        ctx.unit, ctx.current = unit, current
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        current: Pass = ctx.current
        assert current.sink is not None
        current.sink.unit_done(ctx.unit, current.stage, current.micro_batch)
        if current.weights is not None:
            current.weights.leave(current.visit(ctx.unit, backward=True))
        return dx, None, None


class _Exit(torch.autograd.Function):
    """Identity behind a unit: its backward runs before anything in the unit's."""

    @staticmethod
    def forward(ctx: Any, unit: str, current: Pass, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit, ctx.current = unit, current
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.current.weights.enter(ctx.current.visit(ctx.unit, backward=True))
        return None, None, *gradients


def run_unit(unit: str, module: Callable[..., Any], current: Pass, *inputs: Any, recompute: bool = False) -> Any:
    """One unit of a stage on one micro-batch: `module(*inputs, current)`, with all that happens around a unit.

    Its weights are there while it runs forward and backward, and the sink is told when its backward has ended.

    inputs     the hidden states [seq (/ tp), batch, hidden] (or token ids) first
    recompute  keep nothing but the inputs, and run forward again in backward
    returns    what the module returns: a tensor, or a dict of tensors
    """
    training, weights = current.sink is not None, current.weights
    if weights is not None:
        weights.enter(current.visit(unit, backward=False))
    first, *rest = inputs
    if training and first.requires_grad:
        first = _Entrance.apply(first, unit, current)
    if recompute and training:
        out = checkpoint(module, first, *rest, current, use_reentrant=False, preserve_rng_state=False)
    else:
        out = module(first, *rest, current)
    if weights is None:
        return out
    weights.leave(current.visit(unit, backward=False))
    if not training:
        return out
    if isinstance(out, torch.Tensor):
        return _Exit.apply(unit, current, out)[0]
    return dict(zip(out, _Exit.apply(unit, current, *out.values()), strict=True))
