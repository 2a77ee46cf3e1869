"""Tokens on their way to experts and back: what comes back, what is sent, and what runs meanwhile."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import deep_ep_stand_in
import numpy as np
import pytest
import torch

from pool import Context, pool
from small import assembled, config_of
from ultrascale.config.schema import Config
from ultrascale.data.loader import Data
from ultrascale.mesh.axes import Mesh
from ultrascale.models.moe import MixtureOfExperts
from ultrascale.parallel.experts.dispatchers import make_dispatch
from ultrascale.parallel.experts.placement import Placement
from ultrascale.parallel.experts.router import NONE
from ultrascale.step import step_batch

MOE: dict[str, Any] = {
    "model.family": "qwen3_moe",
    "model.num_experts": 8,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 8,
}
TOKENS, K, HIDDEN = 12, 3, 16
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ep": (2, {"parallel.ep": 2}),
    "ep and cp": (4, {"parallel.ep": 2, "parallel.cp": 2, "parallel.expert_axes": ("ep", "cp")}),
    "tp": (2, {"parallel.tp": 2, "parallel.expert_axes": ("tp",)}),
    "dp and ep, copies": (4, {"parallel.dp": 2, "parallel.ep": 2}),
}


DISPATCHES = ("all_to_all", "all_gather")


def _choices(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts (some have none, and some experts no token) and weights, another draw on every rank."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    scores = torch.rand(TOKENS, 6, generator=generator)  # experts 6 and 7 have no token
    chosen = scores.topk(K, dim=-1).indices
    chosen[rank::5] = NONE
    chosen[1, rank % K] = NONE  # dropped alone
    if rank == 1:
        chosen[:] = NONE  # a rank without tokens
    return x, chosen, torch.rand(TOKENS, K, generator=generator)


def _summed(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, holders: list[list[int]]) -> np.ndarray:
    """Σ weight · x by experts of each rank, then over ranks; `holders`: of each rank its experts."""
    total = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for held in holders:
            part = torch.zeros(HIDDEN)
            for expert in held:
                for place in range(K):
                    if chosen[token, place] == expert:
                        part = part + x[token] * weights[token, place]
            total[token] = total[token] + part
    return total.numpy()


def _there_and_back(context: Context | None, config: Config) -> tuple[np.ndarray, np.ndarray, int, list[np.ndarray]]:
    """(Σ weight · x of each token by dispatch and identity, the same at once, rows that arrived, gradients)."""
    assembly = assembled(config, context)
    (stage,) = assembly.stages.values()
    groups = stage.build.experts  # type: ignore[attr-defined]
    dispatch = make_dispatch(groups, 8, torch.float32)
    x, chosen, weights = _choices(assembly.rank)
    leaves = x.requires_grad_(), weights.requires_grad_()
    route = dispatch.route(chosen)
    with patch.dict(sys.modules, {"deep_ep": deep_ep_stand_in}):
        here = dispatch.arrive(dispatch.begin(x, weights, route), route)
    assert here.rows.shape[0] == sum(here.counts)
    mixed = dispatch.combine(here.rows, here.weights, route)
    (mixed * torch.arange(HIDDEN)).sum().backward()
    gradients = [leaf.grad.numpy() for leaf in leaves]  # type: ignore[union-attr]
    each = 8 // len(groups.holders)
    experts = [[dispatch.share_of_place[p] * each + e for e in range(each)] for p in range(groups.travel.size)]
    at_once = _summed(x.detach(), chosen, weights.detach(), experts)
    return mixed.detach().numpy(), at_once, here.rows.shape[0], gradients


def _ran(cut: str, dispatch: str) -> list[tuple[np.ndarray, np.ndarray, int, list[np.ndarray]]]:
    world, overrides = CUTS[cut]
    config = config_of({**MOE, **overrides, "parallel.expert_dispatch": dispatch}, world)
    return pool(world).run(_there_and_back, config) if world > 1 else [_there_and_back(None, config)]


@pytest.mark.parametrize("cut", CUTS)
def test_identity_experts_give_each_token_its_own_weighted_sum_bit_for_bit(cut: str) -> None:
    """By every way to travel: the same bits, there and (of the weights) back."""
    by_exchange, by_gather = (_ran(cut, dispatch) for dispatch in DISPATCHES)
    for (mixed, at_once, _, gradients), (other, _, _, others) in zip(by_exchange, by_gather, strict=True):
        assert np.array_equal(mixed, at_once)
        assert np.array_equal(other, at_once)
        assert np.array_equal(gradients[1], others[1])
        np.testing.assert_allclose(gradients[0], others[0], rtol=1e-6)  # sums of k terms in another order
    if CUTS[cut][0] > 1:
        for (mixed, _, _, gradients), (other, _, _, others) in zip(by_exchange, _ran(cut, "deep_ep"), strict=True):
            assert np.array_equal(other, mixed)
            assert np.array_equal(gradients[1], others[1])
            np.testing.assert_allclose(gradients[0], others[0], rtol=1e-6)
    for ranks in (by_exchange, by_gather):
        valid = sum(int((_choices(rank)[1] != NONE).sum()) for rank in range(CUTS[cut][0]))
        assert sum(arrived for _, _, arrived, _ in ranks) == valid


def _sent(context: Context, config: Config) -> tuple[int, int, list[str]]:
    """Bytes that tokens of one layer took in forward and backward, those of the formula, and what was issued in
    order."""
    assembly = assembled(config, context)
    batch = step_batch(assembly, Data(config).batch(1, assembly.mesh.index(assembly.rank, ["dp", "ep"]), 2, 2))
    (stage,) = assembly.stages.values()
    (layer,) = [m for _, unit in stage.units() for m in unit.modules() if isinstance(m, MixtureOfExperts)]
    routes: list[Any] = []
    original = layer.dispatch.route
    layer.dispatch.route = lambda chosen: routes.append(original(chosen)) or routes[-1]  # type: ignore[method-assign, func-returns-value]
    assembly.groups.ledger.clear()
    assembly.engine.run(batch)
    assembly.gradients.finish()
    rows = assembly.groups.ledger.rows
    calls = [f"{row.op} {','.join(row.axes)}" for row in rows]
    own, model, policy = assembly.mesh.index(assembly.rank, ["ep"]), config.model, assembly.policy
    hidden, compute, sums = model.hidden_size, policy.compute.itemsize, policy.combine.itemsize
    floats = [row for row in rows if not row.dtype.startswith("int") and row.phase in ("dispatch", "backward")]
    moved = sum(row.bytes for row in floats if row.axes == ("ep",))
    if config.parallel.expert_dispatch == "all_gather":
        tokens = sum(m.inputs.numel() for m in batch.micro_batches) // config.parallel.tp
        assert model.num_experts_per_tok is not None
        weights = model.num_experts_per_tok * policy.master.itemsize
        # Tokens there and sums back, weights there, and the gradients of all three, to each other rank.
        return moved, 2 * tokens * (config.parallel.ep - 1) * (hidden * (compute + sums) + weights), calls
    away = sum(sum(route.send) - route.send[own] for route in routes)
    arrived = sum(sum(r.receive) - r.receive[own] for r in routes)
    # To the experts and, as gradients, back; outputs come the other way, and their gradients go.
    return moved, compute * hidden * 2 * (away + arrived), calls


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(("compute", "combine"), [("float64", "wide"), ("bfloat16", "wide"), ("bfloat16", "compute")])
def test_bytes_sent_are_those_of_the_formula(dispatch: str, compute: str, combine: str) -> None:
    """Tokens · experts of each less what stays, or all tokens to all other ranks; sums as wide as they are taken."""
    keys = {"parallel.ep": 2, "model.num_hidden_layers": 1, "batch.micro_size": 2}
    formats = {"precision.compute": compute, "precision.combine": combine}
    config = config_of({**MOE, **keys, **formats, "parallel.expert_dispatch": dispatch}, 2)
    for moved, expected, _ in pool(2).run(_sent, config):
        assert moved == expected > 0


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_the_shared_expert_runs_while_tokens_travel(dispatch: str) -> None:
    """Its own messages over tp are issued after the tokens', and before their arrival is awaited."""
    keys = {"parallel.ep": 2, "parallel.tp": 2, "model.num_hidden_layers": 1, "batch.micro_size": 2}
    further = {"model.n_shared_experts": 1, "parallel.expert_tensor_axes": (), "parallel.expert_dispatch": dispatch}
    config = config_of({**MOE, **keys, **further}, 4)
    for *_, calls in pool(4).run(_sent, config):
        travelling = [i for i, call in enumerate(calls) if call.endswith(" ep")]
        # Numbers of rows (or choices), the rows (or tokens and weights), and after the shared expert's gather and
        # scatter the outputs.
        last = 1 if dispatch == "all_to_all" else 2
        assert calls[travelling[last] + 1 : travelling[last + 1]] == ["all_gather tp", "reduce_scatter tp"]


def test_every_share_of_the_experts_is_held_by_as_many_ranks_as_cut_an_expert() -> None:
    mesh = Mesh(sizes={"dp": 2, "ep": 2, "cp": 2, "tp": 2})
    for expert_axes, tensor_axes in ((("ep",), ("tp",)), (("ep", "cp"), ()), (("cp", "tp"), ("ep",)), ((), ("tp",))):
        placement = Placement(mesh.expand(expert_axes), mesh.expand(tensor_axes))
        size = mesh.size(placement.group_axes(mesh))
        for rank in range(mesh.world_size):
            holders = placement.holders(mesh, rank)
            assert len(holders) == mesh.size(expert_axes)
            assert {len(places) for places in holders} == {mesh.size(tensor_axes)}
            assert sorted(place for places in holders for place in places) == list(range(size))
            members = mesh.members(rank, placement.group_axes(mesh))
            for share, places in enumerate(holders):
                assert {mesh.index(members[place], expert_axes) for place in places} == {share}
