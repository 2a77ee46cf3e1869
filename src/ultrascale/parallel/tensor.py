"""Tensor and sequence parallel layers (Shoeybi et al. 2019; Korthikanti et al. 2022).

Between layers a tensor is [seq, batch, hidden], whole on every tp rank; under sequence parallelism it is
[seq / tp, batch, hidden], each rank's own tokens. The functions here change form at the boundaries. Per transformer
layer that is 2 all-reduces forward and 2 backward, or with sequence parallelism 2 all-gathers + 2 reduce-scatters
forward, the same backward, and 2 more all-gathers of the saved inputs for the weight gradients.

The collective of an input gradient is issued before the weight gradient's GEMM and awaited after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.kernels import reference
from ultrascale.parallel.layout import Layout
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.whole_tokens import WholeTokens


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[tokens, features] view of [seq, batch, features]."""
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True, slots=True)
class _LinearGradient:
    """dW = dyᵀ·x of one linear and one micro-batch. dy [seq, batch, out / tp]"""

    weight: torch.Tensor
    dy: torch.Tensor
    x: WholeTokens
    current: Pass
    ledger: Ledger
    name: str

    def issue(self) -> None:
        self.x.issue()

    def run(self) -> None:
        current, x = self.current, self.x.wait()
        assert current.sink is not None
        self.ledger.mark(f"weight_gradient {self.name}")
        current.sink.accumulate_product(self.weight, _flat(self.dy), _flat(x), current.stage, current.micro_batch)


def _weight_gradient(ctx: Any, dy: torch.Tensor, x: WholeTokens) -> None:
    current: Pass = ctx.current
    assert current.sink is not None
    work = _LinearGradient(ctx.weight, dy, x, current, ctx.group.ledger, ctx.name)
    current.sink.defer(work, current.stage, current.micro_batch)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: Group,
        sequence_parallel: bool,
        current: Pass,
        name: str,
    ) -> torch.Tensor:
        # The parameter is kept on ctx, not among the saved tensors: a hook on those (recompute, offload) would hand
        # back another object, and the sink knows parameters by identity.
        ctx.weight, ctx.group, ctx.sequence_parallel, ctx.current, ctx.name = (
            weight,
            group,
            sequence_parallel,
            current,
            name,
        )
        ctx.save_for_backward(x)
        whole = collectives.all_gather(x, group).wait() if sequence_parallel else x
        return F.linear(whole, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        whole = WholeTokens(x, ctx.group, ctx.sequence_parallel)
        if not ctx.current.splits_backward:
            whole.issue()  # hidden behind dx; a deferred weight gradient gathers in its own time, and keeps less
        dx = dy.matmul(ctx.weight)
        reduce = collectives.reduce_scatter if ctx.sequence_parallel else collectives.all_reduce
        reducing = reduce(dx, ctx.group)
        _weight_gradient(ctx, dy, whole)
        return reducing.wait(), None, None, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: Group,
        sequence_parallel: bool,
        current: Pass,
        name: str,
    ) -> torch.Tensor:
        ctx.weight, ctx.group, ctx.sequence_parallel, ctx.current, ctx.name = (
            weight,
            group,
            sequence_parallel,
            current,
            name,
        )
        ctx.save_for_backward(x)
        part = F.linear(x, weight)
        reduce = collectives.reduce_scatter if sequence_parallel else collectives.all_reduce
        return reduce(part, group).wait()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = collectives.all_gather(dy, ctx.group).wait()
        dx = dy.matmul(ctx.weight)
        _weight_gradient(ctx, dy, WholeTokens(x, ctx.group, sequence_parallel=False))
        return dx, None, None, None, None, None


def column_parallel(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: Group,
    sequence_parallel: bool,
    current: Pass,
    name: str = "",
) -> torch.Tensor:
    """y = all_gather(x) @ weight.T

    x        [seq / tp, batch, in] under sequence parallelism, else [seq, batch, in] equal on all tp ranks
    weight   [out / tp, in]
    returns  [seq, batch, out / tp]
    Backward: dx is reduce-scattered (or all-reduced) over `group`, hidden under dw. Korthikanti et al. 2022, fig. 5.
    """
    return _ColumnParallel.apply(x, weight, group, sequence_parallel, current, name)


def row_parallel(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: Group,
    sequence_parallel: bool,
    current: Pass,
    name: str = "",
) -> torch.Tensor:
    """y = reduce_scatter(x @ weight.T)

    x        [seq, batch, in / tp]
    weight   [out, in / tp]
    returns  [seq / tp, batch, out] under sequence parallelism, else [seq, batch, out] equal on all tp ranks
    """
    return _RowParallel.apply(x, weight, group, sequence_parallel, current, name)


class ColumnLinear(Module):
    """A linear whose output features are cut over tp; several logical weights may share its one GEMM."""

    weight: torch.Tensor

    def __init__(self, build: Build, *members: Layout) -> None:
        super().__init__(build)
        self.declare("weight", *members)
        self.name = members[0].name

    def forward(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        build = self.build
        return column_parallel(x, self.weight, build.tensor_group, build.sequence_parallel, current, self.name)


class RowLinear(Module):
    """A linear whose input features are cut over tp."""

    weight: torch.Tensor

    def __init__(self, build: Build, layout: Layout) -> None:
        super().__init__(build)
        self.declare("weight", layout)
        self.name = layout.name

    def forward(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        build = self.build
        return row_parallel(x, self.weight, build.tensor_group, build.sequence_parallel, current, self.name)


class ReplicatedLinear(Module):
    """A linear whose weight is cut over no axis; several logical weights may share its one GEMM."""

    weight: torch.Tensor

    def __init__(self, build: Build, *members: Layout) -> None:
        super().__init__(build)
        self.declare("weight", *members)
        self.name = members[0].name
        self.alone = Group((), (build.rank,), 0, None, build.tensor_group.ledger)

    def forward(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        """x [tokens, batch, in] → [tokens, batch, out], without a message: a column-parallel linear of one rank"""
        return column_parallel(x, self.weight, self.alone, False, current, self.name)


@dataclass(frozen=True, slots=True)
class _EmbeddingGradient:
    """dW[ids] += dy of one micro-batch, for the rows of this rank."""

    weight: torch.Tensor
    local: torch.Tensor
    """int64 [seq, batch]"""
    elsewhere: torch.Tensor | None
    """bool [seq, batch]: tokens whose row is on another rank."""
    dy: WholeTokens
    current: Pass

    def issue(self) -> None:
        self.dy.issue()

    def run(self) -> None:
        current, dy = self.current, self.dy.wait()
        assert current.sink is not None
        if self.elsewhere is not None:
            dy = dy.masked_fill(self.elsewhere.unsqueeze(-1), 0.0)
        current.sink.accumulate_rows(self.weight, self.local.flatten(), _flat(dy), current.stage, current.micro_batch)


class _VocabParallelEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        weight: torch.Tensor,
        start: int,
        group: Group,
        sequence_parallel: bool,
        current: Pass,
    ) -> torch.Tensor:
        local = ids - start
        elsewhere = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(elsewhere, 0)
        ctx.weight, ctx.group, ctx.sequence_parallel, ctx.current = weight, group, sequence_parallel, current
        ctx.save_for_backward(local, elsewhere)
        part = F.embedding(local, weight)
        if group.size > 1:
            part.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        reduce = collectives.reduce_scatter if sequence_parallel else collectives.all_reduce
        return reduce(part, group).wait()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        local, elsewhere = ctx.saved_tensors
        current: Pass = ctx.current
        assert current.sink is not None
        whole = WholeTokens(dy, ctx.group, ctx.sequence_parallel)
        work = _EmbeddingGradient(ctx.weight, local, elsewhere if ctx.group.size > 1 else None, whole, current)
        current.sink.defer(work, current.stage, current.micro_batch)
        return None, None, None, None, None, None


class VocabParallelEmbedding(Module):
    """Token embedding whose rows are cut over tp.

    owner   a module of this stage whose (tied) weight it is, if there is one
    """

    weight: torch.Tensor

    def __init__(self, build: Build, layout: Layout, owner: Module | None = None) -> None:
        super().__init__(build)
        if owner is None:
            self.declare("weight", layout)
        else:
            self.share("weight", owner, "weight")
        self.start = layout.piece(0, build.mesh) * build.tensor_group.index

    def forward(self, ids: torch.Tensor, current: Pass) -> torch.Tensor:
        """ids int64 [seq, batch] → [seq (/ tp), batch, hidden]"""
        build = self.build
        return _VocabParallelEmbedding.apply(
            ids, self.weight, self.start, build.tensor_group, build.sequence_parallel, current
        )


@dataclass(frozen=True, slots=True)
class _Addition:
    """A small weight gradient that comes with the input's: it only waits to be added with the others of its pass."""

    weight: torch.Tensor
    gradient: torch.Tensor
    current: Pass

    def issue(self) -> None:
        pass

    def run(self) -> None:
        current = self.current
        assert current.sink is not None
        current.sink.accumulate(self.weight, self.gradient, current.stage, current.micro_batch)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, current: Pass) -> torch.Tensor:
        y, inverse_rms = reference.rms_norm(x, weight, eps)
        ctx.weight, ctx.current = weight, current
        ctx.save_for_backward(x, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, inverse_rms = ctx.saved_tensors
        dx, dweight = reference.rms_norm_backward(dy, x, ctx.weight, inverse_rms)
        current: Pass = ctx.current
        assert current.sink is not None
        current.sink.defer(_Addition(ctx.weight, dweight, current), current.stage, current.micro_batch)
        return dx, None, None, None


class RMSNorm(Module):
    """RMS norm over the hidden dim; under sequence parallelism on this rank's tokens only."""

    weight: torch.Tensor

    def __init__(self, build: Build, layout: Layout, eps: float) -> None:
        super().__init__(build)
        self.declare("weight", layout)
        self.eps = eps

    def forward(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, current)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return reference.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        return reference.swiglu_backward(dy, gate_up)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up; keeps only its input for backward. gate_up [..., 2 · ffn / tp] → [..., ffn / tp]"""
    return _SwiGLU.apply(gate_up)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return reference.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return reference.rotate(dy, cos, sin, backward=True), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [seq, batch, heads, head_dim]; keeps no activation."""
    return _Rotate.apply(x, cos, sin)
