"""Exact attention on sequences that cp cuts: what a model calls, whichever way keys and queries meet.

    tokens ─ulysses→ heads ─ring or gather→ attention ─→ heads ─ulysses→ tokens

With one rank on an axis the step over it is none, so plain attention, ring, all-gather, Ulysses and their mix are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.kernels.attention import AttentionBackend
from ultrascale.parallel.context.gather import Gathered
from ultrascale.parallel.context.plan import Rows
from ultrascale.parallel.context.ring import Ring
from ultrascale.parallel.context.split import Cut, Documents
from ultrascale.parallel.context.ulysses import Exchange


@dataclass(frozen=True)
class ContextAttention:
    """Causal attention over the tokens that all ranks of cp hold together.

    cut        how cp cuts a sequence
    meeting    how the queries of one place meet the keys of the others
    exchange   of tokens for heads, around it
    """

    cut: Cut
    meeting: Ring | Gathered
    exchange: Exchange

    @staticmethod
    def of(cut: Cut, gathers: bool, ring: Group, ulysses: Group, backend: AttentionBackend) -> ContextAttention:
        """Over the groups of the ring's and of Ulysses' places; `gathers`: all-gather instead of a ring."""
        meeting = Gathered(ring, cut, backend) if gathers and ring.size > 1 else Ring(ring, cut, backend)
        return ContextAttention(cut, meeting, Exchange(ulysses))

    @staticmethod
    def of_one_rank(rank: int, backend: AttentionBackend) -> ContextAttention:
        """Where cp = 1: every rank holds whole sequences."""
        alone = Group((), (rank,), 0, None, Ledger())
        return ContextAttention.of(Cut(), False, alone, alone, backend)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: tuple[Documents, ...] | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """softmax(q·kᵀ·scale)·v where a query sees its own token and those before it.

        q          [tokens / cp, batch, heads, head_dim]
        k, v       [tokens / cp, batch, kv_heads, head_dim (v: value_dim)]; head h reads kv head h // (heads / kv_heads)
        documents  of each row of the batch, where its documents begin in the whole sequence: a query sees its own
                   document alone. None: each row is one document
        window     tokens that a query sees at most, its own included; None: all
        scale      None: 1/√head_dim
        returns    [tokens / cp, batch, heads, value_dim]
        """
        rows: Rows = q.shape[1] if documents is None else documents
        return _Attention.apply(q, k, v, self, rows, window, q.shape[-1] ** -0.5 if scale is None else scale)


class _Attention(torch.autograd.Function):
    """Keeps what attention was computed on, its output and its log-sum-exp; all of them this rank's share."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: ContextAttention,
        rows: Rows,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        ctx.attention, ctx.rows, ctx.window, ctx.scale, ctx.kv_heads = attention, rows, window, scale, k.shape[2]
        exchange = attention.exchange
        by_head = exchange.to_heads(q, k, v)
        out, lse = attention.meeting.forward(*by_head, rows, window, scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(*by_head, out, lse)
        return exchange.to_tokens(out)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        exchange, meeting = ctx.attention.exchange, ctx.attention.meeting
        gradients = meeting.backward(exchange.to_heads_one(dout), q, k, v, out, lse, ctx.rows, ctx.window, ctx.scale)
        dq, dk, dv = (gradient.to(q.dtype) for gradient in gradients)
        return *exchange.to_tokens_gradients(dq, dk, dv, ctx.kv_heads), None, None, None, None
