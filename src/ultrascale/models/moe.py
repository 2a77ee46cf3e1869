"""Blocks whose feed-forward part is a mixture of experts (Shazeer et al. 2017; Lepikhin et al. 2020, GShard)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ultrascale.comm.differentiable import gather_copies, reduce_from, split
from ultrascale.config.model_section import Model
from ultrascale.models.family import StageModule
from ultrascale.models.sizes import is_sparse, layer_name
from ultrascale.models.transformer import MLP, Block, output_std
from ultrascale.parallel.experts.capacity import within_capacity
from ultrascale.parallel.experts.dispatch import counts_of
from ultrascale.parallel.experts.dispatchers import make_dispatch
from ultrascale.parallel.experts.grouped import GroupedLinear
from ultrascale.parallel.experts.jitter import jittered
from ultrascale.parallel.experts.router import Router, Routing, balance_sum, global_balance_sum, without_padding, z_sum
from ultrascale.parallel.layout import Constant, Kind, Layout, Normal, Use
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.tensor import swiglu

Terms = dict[str, torch.Tensor]


def expert_matrices(name: str, model: Model, shape: tuple[int, int], cut: int, std: float, build: Build) -> Layout:
    """One matrix of every expert, [experts, out, in]: experts over their axes, features over the axes inside of one.

    cut   the dim of features, 1 or 2
    """
    assert build.experts is not None
    assert model.num_experts is not None
    placement = build.experts.placement
    return Layout(
        name=name,
        shape=(model.num_experts, *shape),
        split={0: placement.expert_axes, cut: placement.tensor_axes},
        used_in=Use.TOKENS,  # every rank sends tokens of its own
        tie=None,
        init=Normal(std),
        decay=True,
        lr_scale=1.0,
        pad_to={},
        kind=Kind.MATRIX,
    )


class Experts(Module):
    """SwiGLU of every expert on its own rows."""

    def __init__(self, build: Build, model: Model, prefix: str) -> None:
        super().__init__(build)
        hidden, ffn = model.hidden_size, model.moe_intermediate_size
        assert ffn is not None

        def matrices(name: str, shape: tuple[int, int], cut: int, std: float) -> GroupedLinear:
            layout = expert_matrices(f"{prefix}.{name}.weight", model, shape, cut, std, build)
            return GroupedLinear(build, layout)

        self.gate = matrices("gate_proj", (ffn, hidden), 1, model.initializer_range)
        self.up = matrices("up_proj", (ffn, hidden), 1, model.initializer_range)
        self.down = matrices("down_proj", (hidden, ffn), 2, output_std(model))

    def forward(self, x: torch.Tensor, counts: list[int], current: Pass) -> torch.Tensor:
        """x [rows, hidden], the rows of each expert together → the same; a part of it where an expert is cut."""
        gate_up = torch.cat([self.gate(x, counts, current), self.up(x, counts, current)], dim=-1)
        if self.build.recompute == "selective" and current.sink is not None:
            product = checkpoint(swiglu, gate_up, use_reentrant=False, preserve_rng_state=False)
        else:
            product = swiglu(gate_up)
        return self.down(product, counts, current)


class MixtureOfExperts(Module):
    """Routed experts, and a shared one that sees every token.

    It works on tokens that tp splits: under sequence parallelism they are; without it they are split here and joined
    behind, so that no token is sent twice.
    """

    def __init__(self, build: Build, model: Model, layer: int) -> None:
        super().__init__(build)
        assert build.experts is not None
        assert model.num_experts is not None
        prefix = f"{layer_name(model, layer)}.moe"
        self.model, self.rows = model, build.experts.rows
        router = Layout(
            name=f"{prefix}.router.weight",
            shape=(model.num_experts, model.hidden_size),
            split={},
            used_in=Use.TOKENS,
            tie=None,
            init=Normal(model.initializer_range),
            decay=True,
            lr_scale=1.0,
            pad_to={},
            kind=Kind.MATRIX,
        )
        bias = replace(
            router, name=f"{prefix}.router.bias", shape=(model.num_experts,), init=Constant(0.0), kind=Kind.NORM
        )
        # Behind the slash: state of the run beside the model, as an optimizer's is.
        load = replace(bias, name=f"router.load/{prefix}.router", init=Constant(1 / model.num_experts))
        of_batch = model.router_aux_loss_coef and model.router_aux_loss_scope == "global_batch"
        balanced = model.router_bias_update_rate is not None
        self.router = Router(build, router, bias if balanced else None, load if of_batch else None, model)
        self.layer, self.seed, self.noise_name = layer, build.experts.seed, f"router.noise/{prefix}.router"
        self.experts = Experts(build, model, f"{prefix}.experts")
        self.dispatch = make_dispatch(build.experts, model.num_experts, build.policy.combine)
        shared = model.n_shared_experts * (model.moe_intermediate_size or 0)
        self.shared = MLP(build, model, f"{prefix}.shared_experts", shared) if shared else None

    def forward(self, x: torch.Tensor, current: Pass) -> tuple[torch.Tensor, Terms]:
        """x [seq (/ tp), batch, hidden] → the same, and what keeps the load even."""
        build = self.build
        whole = not build.sequence_parallel
        own = split(x, build.tensor_group) if whole else x
        tokens = own.flatten(0, 1)
        routing, taken = self._routed(tokens, own.shape[0], current)
        route = self.dispatch.route(taken)
        travelling = self.dispatch.begin(tokens, routing.weights, route)
        shared = self.shared(x, current) if self.shared is not None else None  # while tokens travel
        here = self.dispatch.arrive(travelling, route)
        out = self.experts(here.rows, here.counts, current)
        mixed = self.dispatch.combine(out, here.weights, route).to(x.dtype).view(own.shape)
        y = gather_copies(mixed, build.tensor_group) if whole else mixed
        return (y if shared is None else y + shared), self._terms(routing, own, current)

    def _routed(self, tokens: torch.Tensor, seq: int, current: Pass) -> tuple[Routing, torch.Tensor]:
        """What the router says of tokens [seq · batch, hidden], and which of their choices experts take.

        Noise and limits are for training: an evaluation asks what the model knows, and one token after another has no
        whole sequence to share out. Losses, biases and counts go by what was chosen, or an expert would seem less
        wanted the more it is.
        """
        model, training = self.model, current.sink is not None
        first = self.build.tensor_group.index * seq
        seen = tokens
        if training and model.router_jitter_noise:
            assert current.samples is not None
            places, longest = _places(current, first, seq, tokens), model.max_position_embeddings
            noise = model.router_jitter_noise
            seen = jittered(tokens, current.samples, places, longest, noise, self.seed, self.noise_name)
        routing = self.router(seen, current)
        if current.real is not None:
            routing = without_padding(routing, current.real.narrow(0, first, seq).flatten())
        taken, experts = routing.chosen, self.dispatch.experts
        if training and model.expert_capacity_factor is not None:
            places = _places(current, first, seq, tokens)
            taken = within_capacity(taken, places, model.expert_capacity_factor, experts, self.rows)
        if current.load is not None:
            dropped = (taken != routing.chosen).sum().view(1)
            current.load.record(self.layer, current.micro_batch, counts_of(routing.chosen, experts)[1:], dropped)
        return routing, taken

    def _terms(self, routing: Routing, own: torch.Tensor, current: Pass) -> Terms:
        """Sums over this row's tokens on all tp ranks, equal on them; each backpropagates its own part."""
        places, rows, _ = own.shape
        terms: Terms = {}
        if "load" in self.router.kept:
            terms["balance"] = global_balance_sum(routing, self.router.load)
        elif self.model.router_aux_loss_coef:
            per_row = places * self.rows.size if current.lengths is None else current.lengths
            terms["balance"] = balance_sum(routing, rows, per_row, self.rows)
        if self.model.router_z_loss_coef:
            terms["router_z"] = z_sum(routing)
        return {name: reduce_from(term, self.build.tensor_group) for name, term in terms.items()}


def _places(current: Pass, first: int, seq: int, tokens: torch.Tensor) -> torch.Tensor:
    """int64 [seq, batch]: where in its sequence each of the tokens [seq · batch, hidden] is, from `first` on."""
    if current.places is None:
        return torch.arange(first, first + seq, device=tokens.device).unsqueeze(1).expand(-1, tokens.shape[0] // seq)
    return current.places.narrow(0, first, seq)


class MoEBlock(Block):
    """x + attention(norm(x)), then x + experts(norm(x)); a dense layer where the config says so."""

    def _feed_forward(self, build: Build, model: Model, index: int) -> nn.Module:
        sparse = is_sparse(model, index)
        return MixtureOfExperts(build, model, index) if sparse else super()._feed_forward(build, model, index)

    def forward(self, x: torch.Tensor, current: Pass) -> Any:
        """x [seq (/ tp), batch, hidden] → the same, with {term: sum} of its router beside it"""
        x = x + self.attention(self.attention_norm(x, current), current)
        mixed = self.mlp(self.mlp_norm(x, current), current)
        if isinstance(mixed, torch.Tensor):
            return x + mixed
        y, terms = mixed
        return {"hidden": x + y, **terms}


def balance_routers(stages: Iterable[StageModule], counts: Mapping[int, torch.Tensor]) -> None:
    """After a step: moves the biases of this rank's routers, and notes the load for the next step's auxiliary loss;
    `counts` has the tokens of each expert by layer."""
    for stage in stages:
        for _, unit in stage.units():
            for module in unit.modules():
                if isinstance(module, MixtureOfExperts):
                    module.router.balance(counts[module.layer])
