"""Experts that take so many tokens of a sequence and no more (Lepikhin et al. 2020, GShard, §2.2).

The limit holds for each sequence alone, and the tokens that an expert takes are the first of it that chose it. So what
is dropped hangs on no layout, on no other sequence, and on no token behind.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.parallel.experts.dispatch import counts_of
from ultrascale.parallel.experts.router import NONE


@torch.no_grad()
def within_capacity(
    chosen: torch.Tensor, places: torch.Tensor, factor: float, experts: int, row_group: Group
) -> torch.Tensor:
    """The choices of experts that had room; the others are none.

    An expert takes ⌈factor · k · T / experts⌉ of a row's T tokens that chose any.

    chosen      int64 [tokens, k]; tokens lie as [places here, rows]
    places      int64 [places here, rows]: where in its sequence each of them is
    row_group   the ranks that hold the other tokens of these rows

    Zigzag gives a rank pieces from both ends of a sequence, by document: the choices themselves are exchanged, 4 bytes
    each, beside which numbers of each piece would save little and need to know how it was cut.
    """
    k, (here, rows) = chosen.shape[1], places.shape
    message = torch.cat([places.unsqueeze(-1), chosen.view(here, rows, k)], dim=-1).to(torch.int32)
    with row_group.ledger.during("router"):
        gathered = collectives.all_gather(message, row_group).wait().long()
    order = gathered[..., 0].argsort(dim=0).unsqueeze(-1).expand(-1, -1, k)
    by_row = gathered[..., 1:].gather(0, order).transpose(0, 1)  # [rows, seq, k], in the sequence's order
    kept = first_of_each(by_row, factor, experts)
    back = torch.empty_like(by_row.transpose(0, 1), dtype=torch.bool).scatter_(0, order, kept.transpose(0, 1))
    own = back.narrow(0, row_group.index * here, here).reshape(chosen.shape)
    return chosen.masked_fill(~own, NONE)


def first_of_each(choices: torch.Tensor, factor: float, experts: int) -> torch.Tensor:
    """bool, as choices int64 [rows, seq, k] in the order of their sequences: whether the expert had room."""
    rows, _, k = choices.shape
    row = torch.arange(rows, device=choices.device).view(-1, 1, 1)
    buckets = (row * experts + choices).masked_fill(choices == NONE, rows * experts).flatten()
    order = buckets.argsort(stable=True)
    sizes = counts_of(buckets, rows * experts + 1)[1:]
    turn = torch.arange(buckets.numel(), device=buckets.device) - (sizes.cumsum(0) - sizes)[buckets[order]]
    number = torch.empty_like(turn)
    number[order] = turn
    # Of a decimal such as 1.1, which no float is, the ratio that was meant.
    share = Fraction(factor).limit_denominator(10_000)
    tokens = (choices != NONE).any(-1).sum(1)
    room = -(-(tokens * (share.numerator * k)) // (share.denominator * experts))
    return number.view(choices.shape) < room.view(-1, 1, 1)
