"""Faults of experts: where they are, how tokens come back, what balances routers."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import torch
from fault_registry import Patch, fault

from ultrascale.comm.collectives import Pending
from ultrascale.comm.differentiable import Gather
from ultrascale.models import moe
from ultrascale.parallel.experts import all_gather
from ultrascale.parallel.experts.all_to_all import AllToAll
from ultrascale.parallel.experts.load import ExpertLoad
from ultrascale.parallel.experts.router import Router
from ultrascale.parallel.layout import Layout


@fault
def experts_are_summed_over_all_replicas_of_dense_layers() -> Patch:
    """Gradients of different experts are added, as if each rank held the same ones."""
    original = Layout.gradient_axes

    def dense(self: Layout, mesh: Any) -> tuple[str, ...]:
        return mesh.expand(("dp", "ep", "cp")) if "experts" in self.name else original(self, mesh)

    return patch.object(Layout, "gradient_axes", dense)


@fault
def routers_are_taken_for_replicated_over_tp() -> Patch:
    """The router's gradient stays each tp rank's own, though each sees other tokens."""
    original = Layout.gradient_axes

    def without_tp(self: Layout, mesh: Any) -> tuple[str, ...]:
        axes = original(self, mesh)
        return tuple(a for a in axes if not a.startswith("kv_")) if "router" in self.name else axes

    return patch.object(Layout, "gradient_axes", without_tp)


@fault
def outputs_of_experts_are_not_weighted() -> Patch:
    """Combine forgets the router's weights."""
    original = Router.forward

    def unweighted(self: Router, *args: Any) -> Any:
        routing = original(self, *args)
        return dataclasses.replace(routing, weights=torch.ones_like(routing.weights))

    return patch.object(Router, "forward", unweighted)


@fault
def balance_counts_only_tokens_of_this_rank() -> Patch:
    """The auxiliary loss takes local counts for those of the whole row."""
    original = moe.balance_sum

    def local(routing: Any, rows: int, per_row: int, row_group: Any) -> torch.Tensor:
        alone = dataclasses.replace(row_group, ranks=(row_group.ranks[row_group.index],), index=0)
        return original(routing, rows, per_row, alone)

    return patch.object(moe, "balance_sum", local)


@fault
def auxiliary_terms_are_scaled_by_the_number_of_ranks() -> Patch:
    """Each rank's gradient of the auxiliary loss is that of the whole."""
    original = moe.reduce_from
    return patch.object(moe, "reduce_from", lambda term, group: original(term, group) * group.size)


@fault
def rows_come_back_in_the_order_of_experts() -> Patch:
    """The way back forgets that rows were sorted by expert on arrival."""
    original = AllToAll.combine

    def unsorted(self: AllToAll, y: torch.Tensor, weights: torch.Tensor, route: Any) -> torch.Tensor:
        return original(self, y, weights, dataclasses.replace(route, by_expert=torch.arange(route.by_expert.numel())))

    return patch.object(AllToAll, "combine", unsorted)


@fault
def tokens_are_counted_again_when_recomputed() -> Patch:
    """What a forward counts is added up, and recomputation is a forward: the layers of a recomputed block twice."""

    def record(self: ExpertLoad, layer: int, micro_batch: int, chosen: torch.Tensor, dropped: torch.Tensor) -> None:
        known, counts = self._seen.get((layer, micro_batch)), torch.cat([chosen, dropped])
        # Twice the same would leave every sign as it is; tokens of early micro-batches count twice, as under 1F1B.
        self._seen[layer, micro_batch] = counts if known is None else known + counts * (micro_batch == 0)

    return patch.object(ExpertLoad, "record", record)


@fault
def routers_are_balanced_by_local_counts() -> Patch:
    """Each rank moves its biases by what its own tokens chose."""
    original = ExpertLoad.collect

    def collect(self: ExpertLoad, world: Any) -> Any:
        alone = dataclasses.replace(world, ranks=(world.ranks[world.index],), index=0)
        return original(self, alone)

    return patch.object(ExpertLoad, "collect", collect)


@fault
def biases_are_held_in_bfloat16() -> Patch:
    """Biases follow the weights into the compute dtype, where small steps are lost."""
    original = Router.balance

    def balance(self: Router, counts: torch.Tensor) -> None:
        original(self, counts)
        self.bias.copy_(self.bias.to(torch.bfloat16))

    return patch.object(Router, "balance", balance)


@fault
def outputs_of_other_ranks_experts_are_left_out() -> Patch:
    """After an all-gather each rank keeps its own sums for its tokens, without the others'."""

    def own(parts: torch.Tensor, group: Any, in_rank_order: bool) -> torch.Tensor:
        size = parts.shape[0] // group.size
        return parts.narrow(0, group.index * size, size)

    return patch.object(all_gather, "scatter_sum", own)


@fault
def gradients_of_gathered_tokens_are_not_summed() -> Patch:
    """Each rank keeps what its own experts say of its tokens."""
    original = Gather._call

    def call(self: Gather, x: torch.Tensor, back: bool) -> Any:
        if not back:
            return original(self, x, back)
        size = x.shape[0] // self.group.size
        return Pending(x.narrow(0, self.group.index * size, size).clone())

    return patch.object(Gather, "_call", call)


@fault
def room_of_experts_is_counted_by_rank() -> Patch:
    """The limit holds for what a rank has of a sequence, not for all of it."""
    original = moe.within_capacity

    def local(chosen: torch.Tensor, places: torch.Tensor, factor: float, experts: int, group: Any) -> torch.Tensor:
        alone = dataclasses.replace(group, ranks=(group.ranks[group.index],), index=0)
        return original(chosen, places, factor, experts, alone)

    return patch.object(moe, "within_capacity", local)


@fault
def places_are_those_in_memory() -> Patch:
    """Zigzag's pieces are taken for neighbours: what is dropped, and the noise, are other tokens'."""

    def places(current: Any, first: int, seq: int, tokens: torch.Tensor) -> torch.Tensor:
        return torch.arange(first, first + seq).unsqueeze(1).expand(-1, tokens.shape[0] // seq)

    return patch.object(moe, "_places", places)


@fault
def noise_is_drawn_by_row_of_the_micro_batch() -> Patch:
    """All micro-batches and replicas get the same."""
    original = moe.jittered

    def by_row(x: torch.Tensor, samples: torch.Tensor, *args: Any) -> torch.Tensor:
        return original(x, torch.arange(samples.numel()), *args)

    return patch.object(moe, "jittered", by_row)
