"""Collectives under autograd against one process that does the sums and cuts itself, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_comm_collectives import tensor_group
from torch import Tensor

from pool import Context, pool
from ultrascale.comm import differentiable as D

COLUMNS = 3
# name → (ranks start from the same x, ranks use the output alike, what each rank gets from all ranks' x)
Model = tuple[bool, bool, Callable[[list[Tensor], int], Tensor]]


def _piece(x: Tensor, rank: int, size: int) -> Tensor:
    return x.chunk(size)[rank]


def _sends(size: int, rank: int) -> list[int]:
    """Uneven, and not what comes back: rank r sends (2r + i) mod 3 rows to member i."""
    return [(2 * rank + member) % 3 for member in range(size)]


def _exchanged(xs: list[Tensor], rank: int) -> Tensor:
    size = len(xs)
    return torch.cat([x.split(_sends(size, source))[rank] for source, x in enumerate(xs)])


MODELS: dict[str, Model] = {
    "copy_to": (True, False, lambda xs, rank: xs[rank]),
    "reduce_from": (False, True, lambda xs, rank: sum(xs)),  # type: ignore[arg-type,return-value]
    "gather": (False, False, lambda xs, rank: torch.cat(xs)),
    "gather_copies": (False, True, lambda xs, rank: torch.cat(xs)),
    "scatter_sum": (False, False, lambda xs, rank: _piece(sum(xs), rank, len(xs))),  # type: ignore[arg-type]
    "split": (True, False, lambda xs, rank: _piece(xs[rank], rank, len(xs))),
    "exchange": (False, False, _exchanged),
}
ROWS = {
    "copy_to": [("all_reduce", "backward")],
    "reduce_from": [("all_reduce", "forward")],
    "gather": [("all_gather", "forward"), ("reduce_scatter", "backward")],
    "gather_copies": [("all_gather", "forward")],
    "scatter_sum": [("reduce_scatter", "forward"), ("all_gather", "backward")],
    "split": [("all_gather", "backward")],
    "exchange": [("all_to_all", "forward"), ("all_to_all", "backward")],
}


def _input(name: str, rank: int, size: int) -> Tensor:
    same, _, _ = MODELS[name]
    rows = sum(_sends(size, rank)) if name == "exchange" else 2 * size
    generator = torch.Generator().manual_seed(7 if same else 7 + rank)
    return torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64).requires_grad_()


def _loss(y: Tensor, rank: int, alike: bool) -> Tensor:
    """Not linear, so that a wrong forward shows in the gradient; ranks weigh it alike or each its own way."""
    generator = torch.Generator().manual_seed(50 if alike else 50 + rank)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return (weights * y.pow(3)).sum()


def _on_ranks(context: Context, name: str) -> tuple[Tensor, Tensor, list[Any]]:
    group = tensor_group(context)
    size, rank = context.world_size, context.rank
    x = _input(name, rank, size)
    arguments = ()
    if name == "exchange":
        arguments = (_sends(size, rank), [_sends(size, source)[rank] for source in range(size)])
    with context.ledger.during("forward"):
        y = getattr(D, name)(x * 1.0, group, *arguments)
    with context.ledger.during("backward"):
        _loss(y, rank, MODELS[name][1]).backward()
    return y.detach(), x.grad, [(row.op, row.phase) for row in context.ledger.rows]


def _on_one(name: str, size: int) -> tuple[list[Tensor], list[Tensor]]:
    same, alike, forward = MODELS[name]
    xs = [_input(name, rank, size) for rank in range(size)]
    if same:
        xs = [xs[0]] * size
    ys = [forward(xs, rank) for rank in range(size)]
    losses = [_loss(y, rank, alike) for rank, y in enumerate(ys)]
    torch.stack(losses[:1] if alike else losses).sum().backward()
    return [y.detach() for y in ys], [x.grad for x in xs]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_values_gradients_and_rows_are_those_of_one_process(name: str, size: int) -> None:
    ys, gradients = _on_one(name, size)
    for rank, (y, gradient, rows) in enumerate(pool(size).run(_on_ranks, name)):
        torch.testing.assert_close(y, ys[rank], rtol=1e-12, atol=1e-12, msg=f"{name} forward, rank {rank}")
        torch.testing.assert_close(
            gradient, gradients[rank], rtol=1e-12, atol=1e-12, msg=f"{name} backward, rank {rank}"
        )
        assert rows == ROWS[name]


def _shared_gradient(context: Context) -> tuple[Tensor, Tensor]:
    """The gradient of a sum is one tensor for both terms: summing it in place would change the other's."""
    group = tensor_group(context)
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    other = torch.ones(4, dtype=torch.float64, requires_grad=True)
    (D.copy_to(x, group) + other).sum().backward()
    return x.grad, other.grad


def test_backward_leaves_gradients_that_others_hold_alone() -> None:
    for x, other in pool(2).run(_shared_gradient):
        assert x.tolist() == [2.0] * 4
        assert other.tolist() == [1.0] * 4


def _twice(context: Context) -> str:
    group = tensor_group(context)
    x = torch.ones(2, requires_grad=True)
    y = D.copy_to(x, group).pow(2).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        gradient.sum().backward()
    return str(caught.value)


def test_a_second_derivative_is_refused() -> None:
    assert all("once_differentiable" in message for message in pool(2).run(_twice))
