"""Ring attention: keys and values travel round a ring of ranks, one place a step (Liu et al. 2023).

The next block is on its way while attention over the one that is here is computed; outputs are joined by their
log-sum-exp. In backward the blocks go round again, and behind each its gradient, to which every place adds its part;
from the last place that sees the block it goes home. No rank holds more than two blocks of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ultrascale.comm import p2p
from ultrascale.comm.collectives import Nothing, Pending
from ultrascale.comm.group import Group
from ultrascale.kernels.attention import AttentionBackend, merge
from ultrascale.parallel.context.plan import RingPlan, Rows, ring_plan
from ultrascale.parallel.context.split import Cut
from ultrascale.precision.policy import wide

_TAGS = 1 << 20


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
        self._calls = 0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, window: int | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, batch, heads, …] of this place → output and log-sum-exp over all keys of the sequence."""
        plan = self._plan(q, rows, window)
        if self.group.size == 1:
            return self.backend.forward(q, k, v, plan.tiles[0], scale)
        out = lse = q.new_empty(0)
        for step, block in self._blocks(Block(k, v), plan, self._call()):
            if step == 0:
                out, lse = self.backend.forward(q, k, v, plan.tiles[0], scale)
                out, lse = out.to(wide(out.dtype)).contiguous(), lse.contiguous()
            elif block and plan.tiles[step]:
                span, tiles = plan.queries[step], plan.tiles[step]
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
        call = self._call()
        gradients = _Gradients(self.group, plan.reach, own, dtype, call)
        for step, block in self._blocks(own, plan, call):
            part = None
            if block and plan.tiles[step]:
                span, tiles = plan.queries[step], plan.tiles[step]
                dq_part, dk, dv = self.backend.backward(
                    dout[span], q[span], block.k, block.v, out[span], lse[span], tiles, scale
                )
                dq[span] += dq_part
                part = Block(dk.to(dtype), dv.to(dtype))
            gradients.add(step, part)
        return dq, *gradients.of_own()

    def _call(self) -> int:
        """A number for the messages of one call, the same on all ranks: those of two calls are never taken for each
        other, whatever runs between them."""
        self._calls = (self._calls + 1) % _TAGS
        return self._calls

    def _plan(self, q: torch.Tensor, rows: Rows, window: int | None) -> RingPlan:
        return ring_plan(q.shape[0] * self.cut.ring, rows, self.cut, self.group.index, window)

    def _blocks(self, own: Block, plan: RingPlan, call: int) -> Iterator[tuple[int, Block | None]]:
        """Of each step its number and the block of the place so many before this one, if it comes this far.

        While the caller works on a block, it is passed on and the next one comes.
        """
        group, here = self.group, self.group.index
        held = own.message() if plan.reach[here] else own.k.new_empty(0)
        block: Block | None = own
        for step in range(group.size):
            goes = step < plan.reach[(here - step) % group.size]
            comes = step + 1 < group.size and step < plan.reach[(here - step - 1) % group.size]
            sending, coming = _issued(
                group,
                p2p.Message(held, (here + 1) % group.size, call, sends=True) if goes else None,
                p2p.Message(own.k.new_empty(own.numel), (here - 1) % group.size, call, sends=False) if comes else None,
            )
            yield step, block
            sending.wait()
            held = coming.wait()
            block = own.read(held) if held.numel() else None


class _Gradients:
    """Gradients of blocks on their way round the ring, one step behind the blocks."""

    def __init__(self, group: Group, reach: tuple[int, ...], own: Block, dtype: torch.dtype, call: int) -> None:
        self.group, self.reach, self.own, self.dtype, self.call = group, reach, own, dtype, call
        self._here: Block | None = None
        """This place's part of the gradient of its own block."""
        self._coming: Pending = Nothing(group)
        """What the places before this one have summed up of the block that is here next."""
        self._sending: Pending = Nothing(group)
        self._home: Pending = Nothing(group)

    def add(self, step: int, part: Block | None) -> None:
        """Adds this place's part (None: it sees nothing of the block), and passes the sum on, or home."""
        before = self._coming.wait()
        self._sending.wait()
        outgoing = None
        if step == 0:
            self._here = part
        elif step <= self.reach[self._source(step)]:
            total = part.message() if part else self._buffer().zero_()
            if before.numel():
                total += before
            outgoing = self._outgoing(step, total)
        # Issued with what others send at the end of this step: both sides of a message are in the same batch.
        self._sending, self._coming, home = _issued(self.group, outgoing, self._next(step), self._last(step))
        if not isinstance(home, Nothing):
            self._home = home

    def of_own(self) -> Block:
        """The whole gradient of this place's own block."""
        assert self._here is not None  # a query sees itself
        self._sending.wait()
        message = self._home.wait()
        if not message.numel():
            return self._here
        others = self.own.read(message)
        return Block(self._here.k + others.k, self._here.v + others.v)

    def _outgoing(self, step: int, total: torch.Tensor) -> p2p.Message:
        source = self._source(step)
        home = step == self.reach[source]
        return p2p.Message(total, source if home else (self.group.index + 1) % self.group.size, self.call, sends=True)

    def _next(self, step: int) -> p2p.Message | None:
        """The sum of the block that comes next, from the place before this one, if that has added to it."""
        if step == 0 or step + 1 > self.reach[self._source(step + 1)]:
            return None
        return p2p.Message(self._buffer(), (self.group.index - 1) % self.group.size, self.call, sends=False)

    def _last(self, step: int) -> p2p.Message | None:
        """The sum of this place's own block, from the last place that sees it."""
        if step == 0 or step != self.reach[self.group.index]:
            return None
        return p2p.Message(self._buffer(), (self.group.index + step) % self.group.size, self.call, sends=False)

    def _source(self, step: int) -> int:
        return (self.group.index - step) % self.group.size

    def _buffer(self) -> torch.Tensor:
        return torch.empty(self.own.numel, dtype=self.dtype, device=self.own.k.device)


def _issued(group: Group, *messages: p2p.Message | None) -> list[Pending]:
    """Issues what there is of some messages as one; the others are waited for like them, and bring nothing."""
    with group.ledger.during("attention"):
        pending = iter(p2p.batch([message for message in messages if message], group))
    return [next(pending) if message else Nothing(group) for message in messages]
