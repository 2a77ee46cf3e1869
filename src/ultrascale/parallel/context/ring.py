"""Ring attention: keys and values travel round a ring of ranks, one place a step (Liu et al. 2023).

The next block is on its way while attention over the one that is here is computed; outputs are joined by their
log-sum-exp. In backward the blocks go round again, and behind each its gradient, to which every place adds its part;
from the last place that sees the block it goes home. No rank holds more than two blocks of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ultrascale.comm import p2p
from ultrascale.comm.collectives import Nothing, Pending
from ultrascale.comm.group import Group
from ultrascale.kernels.attention import AttentionBackend, merge
from ultrascale.kernels.tiles import Tile
from ultrascale.parallel.context.plan import RingPlan, Rows, ring_plan
from ultrascale.parallel.context.split import Cut
from ultrascale.precision.policy import wide

_BLOCK, _GRADIENT, _HOME = range(3)
"""Kinds of messages, told apart by their tags."""


class Block(NamedTuple):
    """Keys and values of one place."""

    k: torch.Tensor
    """[tokens, batch, kv_heads, head_dim]"""
    v: torch.Tensor
    """[tokens, batch, kv_heads, value_dim]"""

    @property
    def numel(self) -> int:
        return self.k.numel() + self.v.numel()

    def message(self) -> torch.Tensor:
        """One flat tensor."""
        return torch.cat([self.k.reshape(-1), self.v.reshape(-1)])

    def read(self, message: torch.Tensor) -> Block:
        """What a message holds that was made from a block of the same shapes; views."""
        k, v = message.split([self.k.numel(), self.v.numel()])
        return Block(k.view(self.k.shape), v.view(self.v.shape))


class Ring:
    """Attention over the ranks of `group`, each with its tokens as the cut says; of one rank, plain attention."""

    def __init__(self, group: Group, cut: Cut, backend: AttentionBackend) -> None:
        self.group, self.cut, self.backend = group, cut, backend

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, window: int | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, batch, heads, …] of this place → output and log-sum-exp over all keys of the sequence."""
        plan = self._plan(q, rows, window)
        if self.group.size == 1:
            return self.backend.forward(q, k, v, plan.tiles[0], scale)
        out = lse = q.new_empty(0)
        for step, block in self._blocks(Block(k, v), plan):
            if step == 0:
                out, lse = self.backend.forward(q, k, v, plan.tiles[0], scale)
                out, lse = out.to(wide(out.dtype)).contiguous(), lse.contiguous()
            elif block and plan.tiles[step]:
                span, tiles = _queries_of(plan.tiles[step])
                part, part_lse = self.backend.forward(q[span], block.k, block.v, tiles, scale)
                merge(out[span], lse[span], part, part_lse)
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        rows: Rows,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of this place's q, k and v, in their dtype or wider."""
        plan = self._plan(q, rows, window)
        if self.group.size == 1:
            return self.backend.backward(dout, q, k, v, out, lse, plan.tiles[0], scale)
        own = Block(k, v)
        dtype = wide(q.dtype)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        gradients = _Gradients(self.group, plan.reach, own, dtype)
        for step, block in self._blocks(own, plan):
            gradients.expect(step)
            part = None
            if block and plan.tiles[step]:
                span, tiles = _queries_of(plan.tiles[step])
                dq_part, dk, dv = self.backend.backward(
                    dout[span], q[span], block.k, block.v, out[span], lse[span], tiles, scale
                )
                dq[span] += dq_part
                part = Block(dk.to(dtype), dv.to(dtype))
            gradients.add(step, part)
        return dq, *gradients.of_own()

    def _plan(self, q: torch.Tensor, rows: Rows, window: int | None) -> RingPlan:
        return ring_plan(q.shape[0] * self.cut.ring, rows, self.cut, self.group.index, window)

    def _blocks(self, own: Block, plan: RingPlan) -> Iterator[tuple[int, Block | None]]:
        """Of each step its number and the block of the place so many before this one, if it comes this far.

        While the caller works on a block, it is passed on and the next one comes.
        """
        group, here = self.group, self.group.index
        held = own.message() if plan.reach[here] else own.k.new_empty(0)
        block: Block | None = own
        for step in range(group.size):
            sending: Pending = Nothing(group)
            coming: Pending = Nothing(group)
            with group.ledger.during("attention"):
                if step < plan.reach[(here - step) % group.size]:
                    sending = p2p.send(held, group, (here + 1) % group.size, _tag(group, _BLOCK, step))
                if step + 1 < group.size and step < plan.reach[(here - step - 1) % group.size]:
                    buffer = own.k.new_empty(own.numel)
                    coming = p2p.receive(buffer, group, (here - 1) % group.size, _tag(group, _BLOCK, step))
            yield step, block
            sending.wait()
            held = coming.wait()
            block = own.read(held) if held.numel() else None


class _Gradients:
    """Gradients of blocks on their way round the ring, one step behind the blocks."""

    def __init__(self, group: Group, reach: tuple[int, ...], own: Block, dtype: torch.dtype) -> None:
        self.group, self.reach, self.own, self.dtype = group, reach, own, dtype
        self._here: Block | None = None
        """This place's part of the gradient of its own block."""
        self._coming: Pending = Nothing(group)
        self._sending: Pending = Nothing(group)
        self._home: Pending = Nothing(group)
        if reach[group.index]:
            last = (group.index + reach[group.index]) % group.size
            self._home = self._receive(last, _tag(group, _HOME, 0))

    def expect(self, step: int) -> None:
        """Before a step's work: what the places before this one have summed up of the block that is here."""
        self._coming = Nothing(self.group)
        if 2 <= step <= self.reach[self._source(step)]:
            self._coming = self._receive((self.group.index - 1) % self.group.size, _tag(self.group, _GRADIENT, step))

    def add(self, step: int, part: Block | None) -> None:
        """Adds this place's part (None: it sees nothing of the block), and passes the sum on, or home."""
        if step == 0:
            self._here = part
            return
        group, source = self.group, self._source(step)
        before = self._coming.wait()
        self._sending.wait()
        self._sending = Nothing(group)
        if step > self.reach[source]:
            return
        message = part.message() if part else torch.zeros(self.own.numel, dtype=self.dtype, device=self.own.k.device)
        if before.numel():
            message += before
        after = (group.index + 1) % group.size
        home = step == self.reach[source]
        tag = _tag(group, _HOME, 0) if home else _tag(group, _GRADIENT, step + 1)
        with group.ledger.during("attention"):
            self._sending = p2p.send(message, group, source if home else after, tag)

    def of_own(self) -> Block:
        """The whole gradient of this place's own block."""
        assert self._here is not None  # a query sees itself
        self._sending.wait()
        message = self._home.wait()
        if not message.numel():
            return self._here
        others = self.own.read(message)
        return Block(self._here.k + others.k, self._here.v + others.v)

    def _source(self, step: int) -> int:
        return (self.group.index - step) % self.group.size

    def _receive(self, source: int, tag: int) -> Pending:
        buffer = torch.empty(self.own.numel, dtype=self.dtype, device=self.own.k.device)
        with self.group.ledger.during("attention"):
            return p2p.receive(buffer, self.group, source, tag)


def _tag(group: Group, kind: int, step: int) -> int:
    return kind * group.size + step


def _queries_of(tiles: tuple[Tile, ...]) -> tuple[slice, list[Tile]]:
    """The queries that any of the tiles holds, and the tiles counted from there: no pass over the others' output."""
    first = min(tile.queries[0] for tile in tiles)
    last = max(tile.queries[1] for tile in tiles)
    moved = [replace(tile, queries=(tile.queries[0] - first, tile.queries[1] - first)) for tile in tiles]
    return slice(first, last), moved
