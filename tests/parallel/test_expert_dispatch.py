"""Tokens on their way to experts and back: what comes back, what is sent, and what runs meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pool import Context, pool
from small import assembled, config_of
from ultrascale.config.schema import Config
from ultrascale.data.loader import Data
from ultrascale.mesh.axes import Mesh
from ultrascale.models.moe import MixtureOfExperts
from ultrascale.parallel.experts.dispatch import Dispatch
from ultrascale.parallel.experts.placement import Placement
from ultrascale.parallel.experts.router import NONE
from ultrascale.step import step_batch

MOE: dict[str, Any] = {
    "model.family": "qwen3_moe",
    "model.num_experts": 8,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 8,
}
TOKENS, K, HIDDEN = 12, 2, 16
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ep": (2, {"parallel.ep": 2}),
    "ep and cp": (4, {"parallel.ep": 2, "parallel.cp": 2, "parallel.expert_axes": ("ep", "cp")}),
    "tp": (2, {"parallel.tp": 2, "parallel.expert_axes": ("tp",)}),
    "dp and ep, copies": (4, {"parallel.dp": 2, "parallel.ep": 2}),
}


def _choices(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts (some have none, and some experts no token) and weights, another draw on every rank."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    scores = torch.rand(TOKENS, 5, generator=generator)  # experts 5 … 7 have no token
    chosen = scores.topk(K, dim=-1).indices
    chosen[rank::5] = NONE
    return x, chosen, torch.rand(TOKENS, K, generator=generator)


def _there_and_back(context: Context | None, config: Config) -> tuple[np.ndarray, np.ndarray, int]:
    """(Σ weight · x of each token by dispatch and identity, the same at once, rows that arrived)."""
    assembly = assembled(config, context)
    (stage,) = assembly.stages.values()
    groups = stage.build.experts  # type: ignore[attr-defined]
    dispatch = Dispatch(groups, 8)
    x, chosen, weights = _choices(assembly.rank)
    route = dispatch.route(chosen)
    rows = dispatch.arrive(dispatch.begin(x, route), route)
    assert rows.shape[0] == sum(route.counts) == route.by_expert.numel()
    back = dispatch.to_tokens(rows, route).view(TOKENS, K, HIDDEN)
    expected = torch.where((chosen == NONE).unsqueeze(-1), 0.0, x.unsqueeze(1).expand(-1, K, -1))
    mixed, at_once = ((part * weights.unsqueeze(-1)).sum(1).numpy() for part in (back, expected))
    return mixed, at_once, rows.shape[0]


@pytest.mark.parametrize("cut", CUTS)
def test_identity_experts_give_each_token_its_own_weighted_sum_bit_for_bit(cut: str) -> None:
    world, overrides = CUTS[cut]
    config = config_of({**MOE, **overrides}, world)
    ranks = pool(world).run(_there_and_back, config) if world > 1 else [_there_and_back(None, config)]
    for mixed, at_once, _ in ranks:
        assert np.array_equal(mixed, at_once)
    valid = sum(int((_choices(rank)[1] != NONE).sum()) for rank in range(world))
    assert sum(arrived for *_, arrived in ranks) == valid


def _sent(context: Context, config: Config) -> tuple[int, int, list[str]]:
    """Bytes of rows that one layer sent in forward and backward, those of the formula, and what was issued in order."""
    assembly = assembled(config, context)
    batch = step_batch(assembly, Data(config).batch(1, assembly.mesh.index(assembly.rank, ["dp", "ep"]), 2, 2))
    (stage,) = assembly.stages.values()
    (layer,) = [m for _, unit in stage.units() for m in unit.modules() if isinstance(m, MixtureOfExperts)]
    routes = []
    original = layer.dispatch.route
    layer.dispatch.route = lambda chosen: routes.append(original(chosen)) or routes[-1]  # type: ignore[method-assign, func-returns-value]
    assembly.groups.ledger.clear()
    assembly.engine.run(batch)
    assembly.gradients.finish()
    rows = assembly.groups.ledger.rows
    moved = sum(row.bytes for row in rows if row.op == "all_to_all" and row.dtype != "int64" and row.phase != "reduce")
    away = sum(sum(route.send) - route.send[assembly.mesh.index(assembly.rank, ["ep"])] for route in routes)
    arrived = sum(sum(r.receive) - r.receive[assembly.mesh.index(assembly.rank, ["ep"])] for r in routes)
    # To the experts and, as gradients, back; outputs come the other way, and their gradients go.
    expected = 8 * config.model.hidden_size * 2 * (away + arrived)
    return moved, expected, [f"{row.op} {','.join(row.axes)}" for row in rows]


def test_bytes_sent_are_tokens_times_experts_of_each_less_what_stays() -> None:
    config = config_of({**MOE, "parallel.ep": 2, "model.num_hidden_layers": 1, "batch.micro_size": 2}, 2)
    for moved, expected, _ in pool(2).run(_sent, config):
        assert moved == expected > 0


def test_the_shared_expert_runs_while_tokens_travel() -> None:
    """Its own messages over tp are issued after the tokens', and before their arrival is awaited."""
    keys = {"parallel.ep": 2, "parallel.tp": 2, "model.num_hidden_layers": 1, "batch.micro_size": 2}
    config = config_of({**MOE, **keys, "model.n_shared_experts": 1, "parallel.expert_tensor_axes": ()}, 4)
    for *_, calls in pool(4).run(_sent, config):
        travelling = [i for i, call in enumerate(calls) if call == "all_to_all ep"]
        # Numbers of rows, the rows, and after the shared expert's gather and scatter the outputs.
        assert calls[travelling[1] + 1 : travelling[2]] == ["all_gather tp", "reduce_scatter tp"]


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
