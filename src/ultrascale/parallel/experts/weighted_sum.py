"""Σ weight · output over the rows of each token, in an order that no device changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""y [rows, hidden] and the rows' weights [rows] → [tokens, hidden], in the weights' dtype."""


def weighted_sum(
    y: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, add: Add, sums: torch.dtype
) -> torch.Tensor:
    """[tokens, hidden] in `sums`.

    y         [rows, hidden]
    weights   [tokens, k], wide
    rows      int64 [rows]: which of the choices (token · k + place) each row is an output of, or a part of one
    add       adds rows up by token
    """
    return _WeightedSum.apply(y, weights, rows, add, sums)


class _WeightedSum(torch.autograd.Function):
    """Keeps outputs as narrow as they are; autograd's own product would keep them wide."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, add: Add, sums: torch.dtype
    ) -> torch.Tensor:
        of_row = weights.flatten().index_select(0, rows)
        ctx.save_for_backward(y, of_row, rows)
        ctx.shape = weights.shape
        return add(y, of_row.to(sums))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        y, weights, rows = ctx.saved_tensors
        of_row = gradient.index_select(0, rows // ctx.shape[1]).to(weights.dtype)
        dots = torch.linalg.vecdot(of_row, y.to(weights.dtype))
        dweights = weights.new_zeros(ctx.shape)
        # Parts of one output lie on several ranks, and their products are added: at most as many as cut an expert.
        dweights.view(-1).index_add_(0, rows, dots)
        return (of_row * weights.unsqueeze(-1)).to(y.dtype), dweights, None, None, None


def by_expert(tokens: torch.Tensor, counts: Sequence[int], size: int) -> Add:
    """Adds the rows of one expert after those of another: no token has two rows of one expert.

    tokens   int64 [rows]: of which token each row is, the rows of each expert together
    size     how many tokens there are
    """

    def add(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = weights.new_zeros(size, y.shape[1])
        for part, of_part, to in zip(y.split(counts), weights.split(counts), tokens.split(counts), strict=True):
            total.index_add_(0, to, part.to(total.dtype) * of_part.unsqueeze(-1))
        return total

    return add


def by_turns(slots: torch.Tensor, fresh: torch.Tensor) -> Add:
    """Adds every token's first row, then every token's second, …: rows of one rank together, then the ranks' sums.

    slots   int64 [tokens, turns]: each token's rows in order, −1 behind the last
    fresh   bool [tokens, turns]: whether a row comes from another rank than the one before
    """

    def add(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = weights.new_zeros(slots.shape[0], y.shape[1])
        if not y.shape[0]:
            return total
        of_rank = torch.zeros_like(total)
        for row, new in zip(slots.unbind(1), fresh.unsqueeze(-1).unbind(1), strict=True):
            some = row.clamp(min=0)
            value = y.index_select(0, some).to(total.dtype) * weights.index_select(0, some).unsqueeze(-1)
            value.masked_fill_((row < 0).unsqueeze(-1), 0.0)
            total += of_rank.masked_fill(~new, 0.0)
            of_rank = of_rank.masked_fill_(new, 0.0).add_(value)
        return total.add_(of_rank)

    return add


def turns(tokens: torch.Tensor, origins: torch.Tensor, size: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`slots` and `fresh` of `by_turns`.

    tokens    int64 [rows]: of which token each row is; rows of one rank together
    origins   int64 [rows]: the place of that rank
    size      how many tokens there are
    most      rows that a token can have
    """
    order = tokens.argsort(stable=True)
    sorted_tokens = tokens[order]
    numbers = tokens.new_zeros(size).scatter_add_(0, tokens, torch.ones_like(tokens))
    turn = torch.arange(tokens.numel(), device=tokens.device) - (numbers.cumsum(0) - numbers)[sorted_tokens]
    slots = tokens.new_full((size, most), -1)
    slots[sorted_tokens, turn] = order
    origin = torch.cat([origins, origins.new_full((1,), -1)])[slots]  # −1 is the last: of no row
    fresh = torch.zeros_like(slots, dtype=torch.bool)
    fresh[:, 1:] = (slots[:, 1:] >= 0) & (origin[:, 1:] != origin[:, :-1])
    return slots, fresh
