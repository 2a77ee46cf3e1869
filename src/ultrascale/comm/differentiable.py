"""Collectives that autograd sees through, each beside its transpose. All work on dim 0.

Which one belongs where follows from one question: is the gradient that arrives whole on each rank (the ranks
do the same with the output) or in parts (they do different things with it)?

    function         forward                backward               output is used
    copy_to          nothing                all_reduce             differently: the gradient comes in parts
    reduce_from      all_reduce             nothing                alike
    gather           all_gather             reduce_scatter         differently: the gradient comes in parts
    gather_copies    all_gather             own piece              alike
    scatter_sum      reduce_scatter         all_gather             –
    split            own piece              all_gather             –
    exchange         all_to_all             all_to_all back        –

`begin` and `finish` are the halves of `exchange` and of `gather`, for what can be computed meanwhile.

Megatron's f and g (Shoeybi et al. 2019, §3) are the first two; g and ḡ of sequence parallelism (Korthikanti
et al. 2022, §4.2.2) are `gather` and `scatter_sum`. Rows in the ledger carry the phase in which the forward
or backward runs. A group of one rank returns its input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group


def copy_to(x: Tensor, group: Group) -> Tensor:
    """The same x on every rank, used differently on each: its gradients are summed over the group.

    x [...] → [...]
    """
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum over the group, used alike on each rank: its gradient goes to every term as it is.

    x [...] → [...]
    """
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def gather(x: Tensor, group: Group) -> Tensor:
    """The members' pieces joined, used differently on each rank: each keeps its piece of the summed gradient.

    x [n, ...] → [size · n, ...]
    """
    return x if group.size == 1 else _Gather.apply(x, group)


def gather_copies(x: Tensor, group: Group) -> Tensor:
    """The members' pieces joined, used alike on each rank: each keeps its piece of a gradient that is whole.

    x [n, ...] → [size · n, ...]
    """
    return x if group.size == 1 else _GatherCopies.apply(x, group)


def scatter_sum(x: Tensor, group: Group, in_rank_order: bool = False) -> Tensor:
    """This rank's piece of the sum over the group; `in_rank_order` as in `collectives.reduce_scatter`.

    x [size · n, ...] → [n, ...]; ValueError when dim 0 does not divide
    """
    return x if group.size == 1 else _ScatterSum.apply(x, group, in_rank_order)


def split(x: Tensor, group: Group) -> Tensor:
    """This rank's piece of an x that every rank has; the gradient is joined from the pieces.

    x [size · n, ...] → [n, ...]; ValueError when dim 0 does not divide
    """
    return x if group.size == 1 else _Split.apply(x, group)


def exchange(
    x: Tensor,
    group: Group,
    send_splits: Sequence[int] | None = None,
    receive_splits: Sequence[int] | None = None,
) -> Tensor:
    """Piece i of dim 0 goes to member i, as in `collectives.all_to_all`; gradients go back the same way.

    x [sum(send_splits), ...] → [sum(receive_splits), ...]; ValueError when the splits do not fit
    """
    under_way = Exchange(group, send_splits, receive_splits)
    return finish(begin(x, under_way), under_way)


class UnderWay(ABC):
    """A call that was begun and not finished: forward's, and later its gradient's."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.pending: Pending | None = None

    def issue(self, x: Tensor, back: bool = False) -> Tensor:
        self.pending = self._call(x, back)
        return self.pending.unfinished

    def wait(self) -> Tensor:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending.wait()

    @abstractmethod
    def _call(self, x: Tensor, back: bool) -> Pending:
        """Begins forward's call, or that of its gradient."""


class Exchange(UnderWay):
    """An `exchange` in two halves."""

    def __init__(
        self, group: Group, send_splits: Sequence[int] | None = None, receive_splits: Sequence[int] | None = None
    ) -> None:
        super().__init__(group)
        self.send, self.receive = send_splits, receive_splits

    def _call(self, x: Tensor, back: bool) -> Pending:
        # None on the receiving side means "as many as are sent", so the way back starts from what was sent.
        there, here = self.send, self.receive
        if back:
            there, here = here if here is not None else there, there
        return collectives.all_to_all(x, self.group, there, here)


class Gather(UnderWay):
    """A `gather` in two halves."""

    def _call(self, x: Tensor, back: bool) -> Pending:
        return collectives.reduce_scatter(x, self.group) if back else collectives.all_gather(x, self.group)


def begin(x: Tensor, under_way: UnderWay) -> Tensor:
    """A call begun: what comes out must go to `finish`, unread, and nowhere else.

    What is computed between the two runs while the rows travel; and in backward, where autograd runs the later nodes
    first, the same while their gradients do.
    """
    return x if under_way.group.size == 1 else _Begin.apply(x, under_way)


def finish(unfinished: Tensor, under_way: UnderWay) -> Tensor:
    """Waits for a call that was begun, and returns what it comes to."""
    return unfinished if under_way.group.size == 1 else _Finish.apply(unfinished, under_way)


def _own_piece(x: Tensor, group: Group) -> Tensor:
    if x.dim() == 0 or x.shape[0] % group.size:
        raise ValueError(f"split over {group}: dim 0 of {tuple(x.shape)} does not divide by its {group.size} members")
    rows = x.shape[0] // group.size
    return x.narrow(0, group.index * rows, rows)


def _sum(x: Tensor, group: Group) -> Tensor:
    # A copy: the tensor may be saved for backward, or be the gradient of another node too.
    return collectives.all_reduce(x.clone(), group).wait()


# once_differentiable: a gradient of a gradient would silently miss the collectives of the backward.


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_gather(x, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return collectives.reduce_scatter(gradient, ctx.group).wait(), None


class _GatherCopies(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return collectives.all_gather(x, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_piece(gradient, ctx.group), None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_rank_order: bool) -> Tensor:
        ctx.group = group
        return collectives.reduce_scatter(x, group, in_rank_order).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_gather(gradient, ctx.group).wait(), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own_piece(x, group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return collectives.all_gather(gradient, ctx.group).wait(), None


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, under_way: UnderWay) -> Tensor:
        ctx.under_way = under_way
        return under_way.issue(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.under_way.wait(), None  # not `gradient`, which only stands for it


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, unfinished: Tensor, under_way: UnderWay) -> Tensor:
        ctx.under_way = under_way
        under_way.wait()
        return unfinished.view_as(unfinished)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.under_way.issue(gradient, back=True)
        return gradient, None  # has the shape that autograd expects; `_Begin` returns what arrives
