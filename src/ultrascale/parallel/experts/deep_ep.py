"""Tokens travel by DeepEP's kernels (deep_ep.Buffer of https://github.com/deepseek-ai/DeepEP), on GPUs.

A token goes once to each rank that holds any of its experts, with its choices there and their weights; the rank adds up
what its own experts make of it, and DeepEP adds the ranks' sums on the way back. Both travel as bfloat16.

Written against the published interface and tested against a stand-in with its meaning; not run on GPUs yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ultrascale.comm.collectives import Pending, record
from ultrascale.parallel.experts.dispatch import Arrived, Dispatch
from ultrascale.parallel.experts.weighted_sum import by_expert, weighted_sum

Pair = tuple[torch.Tensor, torch.Tensor]
"""Tokens [rows, hidden] and weights [rows, k]."""


@lru_cache(maxsize=4)
def _buffer(group: Any, hidden_bytes: int) -> Any:
    """The memory that the kernels of all layers share; the first call is collective over the group."""
    from deep_ep import Buffer

    size = group.size()
    configs = [Buffer.get_dispatch_config(size), Buffer.get_combine_config(size)]
    nvlink = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)
    return Buffer(group, nvlink, rdma)


class _Event:
    """DeepEP's event, as `Pending` awaits a collective."""

    def __init__(self, event: Any) -> None:
        self.wait = event.current_stream_wait


@dataclass(slots=True)
class DeepRoute:
    chosen: torch.Tensor
    """int64 [tokens, k]"""
    buffer: Any = None
    handle: Any = None
    """DeepEP's own record of who sent what; from the dispatch on, as what follows."""
    counts: list[int] | None = None
    """Rows of each expert that is here."""
    received: torch.Tensor | None = None
    """int64 [received, k]: choices of arrived tokens among the experts here, −1 for the others."""
    away: int = 0
    """Tokens that this rank sends to others."""
    here: int = 0
    """Tokens that it keeps."""
    pending: Pending | None = None
    gradients: Pair | None = None

    def wait(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None


class DeepEP(Dispatch[DeepRoute]):
    """Dropless; a token travels once to each rank that it needs."""

    def route(self, chosen: torch.Tensor) -> DeepRoute:
        assert self.share_of_place == [*range(self.group.size)], "experts lie in the order of the ranks"
        return DeepRoute(chosen)

    def begin(self, x: torch.Tensor, weights: torch.Tensor, route: DeepRoute) -> Pair:
        with self.group.ledger.during("dispatch"):
            return _Begin.apply(x, weights, route, self)

    def arrive(self, travelling: Pair, route: DeepRoute) -> Arrived:
        x, weights = _Finish.apply(*travelling, route, self)
        rows = _rows(route)
        return Arrived(x.index_select(0, rows // weights.shape[1]), route.counts or [], weights)

    def combine(self, y: torch.Tensor, weights: torch.Tensor, route: DeepRoute) -> torch.Tensor:
        rows, (size, k) = _rows(route), weights.shape
        parts = weighted_sum(y, weights, rows, by_expert(rows // k, route.counts or [], size), self.sums)
        with self.group.ledger.during("dispatch"):
            return _Combine.apply(parts.to(y.dtype), route, self).to(self.sums)

    def there(self, x: torch.Tensor, weights: torch.Tensor | None, route: DeepRoute) -> Pair:
        """Tokens on their way to the ranks of their experts, or (without weights) gradients the same way again."""
        buffer = route.buffer = _buffer(self.group.process_group, x.shape[1] * x.element_size())
        if weights is None:
            arriving, *_, event = buffer.dispatch(x.contiguous(), handle=route.handle, **_aside(buffer))
            sent_weights = x.new_empty(0)
        else:
            per_rank, per_rdma, per_expert, in_rank, _ = buffer.get_dispatch_layout(route.chosen, self.experts)
            to_ranks = per_rank.tolist()
            route.here = to_ranks[self.group.index]
            route.away = sum(to_ranks) - route.here
            arriving, route.received, sent_weights, route.counts, route.handle, event = buffer.dispatch(
                x.contiguous(),
                topk_idx=route.chosen,
                topk_weights=weights.float(),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                **_aside(buffer),
            )
        self._note(x, route.away)
        route.pending = Pending(arriving, _Event(event), ledger=self.group.ledger)  # type: ignore[arg-type]
        return arriving, sent_weights

    def back(self, x: torch.Tensor, weights: torch.Tensor | None, route: DeepRoute) -> tuple[torch.Tensor, Any]:
        """Sums over ranks on their way home, of outputs, or of gradients with those of the weights."""
        home, home_weights, event = route.buffer.combine(
            x.contiguous(), route.handle, topk_weights=weights, **_aside(route.buffer)
        )
        self._note(x, x.shape[0] - route.here)
        route.pending = Pending(home, _Event(event), ledger=self.group.ledger)  # type: ignore[arg-type]
        return home, home_weights

    def _note(self, x: torch.Tensor, rows: int) -> None:
        record(self.group, "all_to_all", x, rows * x.shape[1] * x.element_size(), "deep_ep")


def _aside(buffer: Any) -> dict[str, Any]:
    """Runs on DeepEP's own stream, behind what was computed so far."""
    return {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}


def _rows(route: DeepRoute) -> torch.Tensor:
    """int64: which of the received choices each expert's row is, the rows of each expert together."""
    assert route.received is not None
    assert route.counts is not None
    own = route.received.flatten()
    return own.masked_fill(own < 0, len(route.counts)).argsort(stable=True)[: sum(route.counts)]


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, route: DeepRoute, dispatch: DeepEP) -> Pair:
        ctx.route, ctx.dtype = route, weights.dtype
        return dispatch.there(x, weights, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.route.wait()
        x, weights = ctx.route.gradients  # not `gradients`, which only stand for them
        ctx.route.gradients = None
        return x, weights.to(ctx.dtype), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, route: DeepRoute, dispatch: DeepEP) -> Pair:
        ctx.route, ctx.dispatch = route, dispatch
        route.wait()
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> Any:
        ctx.route.gradients = ctx.dispatch.back(x, weights, ctx.route)
        return x, weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, route: DeepRoute, dispatch: DeepEP) -> torch.Tensor:
        ctx.route, ctx.dispatch = route, dispatch
        home, _ = dispatch.back(parts, None, route)
        route.wait()
        return home

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        arriving, _ = ctx.dispatch.there(gradient, None, ctx.route)
        ctx.route.wait()
        return arriving, None, None
