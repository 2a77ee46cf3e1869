"""What experts have room for, and the noise that routers see: by place in the sequence, whatever cuts it."""

from __future__ import annotations

from math import ceil

import pytest
import torch

from small import assembled, config_of, step_batch_of, tokens
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.models.moe import MixtureOfExperts
from ultrascale.parallel.experts.capacity import first_of_each, within_capacity
from ultrascale.parallel.experts.jitter import jittered
from ultrascale.parallel.experts.router import NONE, Routing, balance_sum, without_padding
from ultrascale.parallel.passes import Pass

EXPERTS, K = 5, 2
ALONE = Group((), (0,), 0, None, Ledger())
MOE = {
    "model.family": "qwen3_moe", "model.num_experts": 4, "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 8, "model.num_hidden_layers": 1, "batch.micro_size": 4,
}  # fmt: skip


def drawn(rows: int, seq: int) -> torch.Tensor:
    """Choices [rows, seq, k]; the first expert is liked best, and the end of each row but the first is no text."""
    generator = torch.Generator().manual_seed(seq)
    liking = torch.rand(rows, seq, EXPERTS, generator=generator) + torch.tensor([1.0, 0.2, 0, 0, 0])
    choices = liking.topk(K, dim=-1).indices
    for row in range(1, rows):
        choices[row, seq - row :] = NONE
    return choices


@pytest.mark.parametrize("factor", [0.1, 0.8, 1.0, 1.1, 1.5])
def test_an_expert_takes_the_first_of_a_row_up_to_its_share(factor: float) -> None:
    choices = drawn(3, 20)
    kept = first_of_each(choices, factor, EXPERTS)
    for row in range(3):
        valid = int((choices[row, :, 0] != NONE).sum())
        room = ceil(round(factor * K * valid / EXPERTS, 9))
        taken = [0] * EXPERTS
        for token in range(valid):
            for place in range(K):
                expert = int(choices[row, token, place])
                assert bool(kept[row, token, place]) == (taken[expert] < room), (row, token, expert)
                taken[expert] += 1


def test_eleven_tenths_of_ten_are_eleven() -> None:
    """1.1 is no float, and the next one above times 10 is above 11."""
    choices = torch.zeros(1, 20, 1, dtype=torch.int64)  # all want the first of two experts
    assert int(first_of_each(choices, 1.1, 2).sum()) == 11


def test_what_is_dropped_hangs_on_no_order_in_memory_and_on_no_token_behind() -> None:
    choices, places = drawn(2, 16).transpose(0, 1), torch.arange(16).unsqueeze(1).expand(-1, 2)
    flat = choices.reshape(-1, K)
    expected = within_capacity(flat, places, 0.8, EXPERTS, ALONE).view(16, 2, K)
    assert int((expected != choices).sum()) > 0
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    shuffled = within_capacity(choices[order].reshape(-1, K), places[order], 0.8, EXPERTS, ALONE)
    assert torch.equal(shuffled.view(16, 2, K), expected[order])
    later = choices.clone()
    later[12:, 0] = later[12:, 0].flip(0)
    assert torch.equal(within_capacity(later.reshape(-1, K), places, 0.8, EXPERTS, ALONE).view(16, 2, K)[:12],
                       expected[:12])  # fmt: skip


def test_noise_is_within_its_bounds_and_other_for_each_sample_place_feature_and_router() -> None:
    samples, places = torch.tensor([3, 900_000_000_001]), torch.arange(6).unsqueeze(1).expand(-1, 2)
    ones = torch.ones(12, 10)
    noise = jittered(ones, samples, places, 4096, 0.1, 7, "a")
    assert float(noise.min()) >= 0.9
    assert float(noise.max()) <= 1.1
    assert float(noise.std()) == pytest.approx(0.1 / 3**0.5, rel=0.2)
    assert noise.unique().numel() == noise.numel()
    assert not torch.equal(noise, jittered(ones, samples, places, 4096, 0.1, 7, "b"))
    assert not torch.equal(noise, jittered(ones, samples, places, 4096, 0.1, 8, "a"))
    alone = jittered(ones[:3], samples[1:], places[3:, 1:], 4096, 0.1, 7, "a")
    assert torch.equal(alone, noise.view(6, 2, 10)[3:, 1])
    assert jittered(ones.bfloat16(), samples, places, 4096, 1e-4, 7, "a").unique().numel() > 100


def test_an_evaluation_has_neither_noise_nor_limits() -> None:
    losses = []
    for further in ({}, {"model.router_jitter_noise": 0.5, "model.expert_capacity_factor": 0.3}):
        assembly = assembled(config_of({**MOE, **further}))
        batch = step_batch_of(assembly, *tokens(assembly.config))
        losses.append([float(engine.run(batch)[0]["lm"]) for engine in (assembly.evaluation, assembly.engine)])
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]


def test_a_token_for_which_no_expert_has_room_gets_nothing_and_other_weights_stay() -> None:
    """The block then hands on what came in; an output that is left counts as much as with the others beside it."""
    assembly = assembled(config_of({**MOE, "model.expert_capacity_factor": 0.5}))
    (stage,) = assembly.stages.values()
    (layer,) = [m for _, unit in stage.units() for m in unit.modules() if isinstance(m, MixtureOfExperts)]
    x = torch.randn(8, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    routed = []
    original = layer._routed
    layer._routed = lambda *args: routed.append(original(*args)) or routed[-1]  # type: ignore[method-assign, func-returns-value]
    with torch.no_grad():
        y, _ = layer(x, Pass(0, 0, assembly.gradients))
        routing, taken = routed[0]
        for token, (row, choice, weight) in enumerate(zip(x.flatten(0, 1), taken, routing.weights, strict=True)):
            expected = torch.zeros(16, dtype=torch.float64)
            for expert, share in zip(choice.tolist(), weight, strict=True):
                if expert != NONE:
                    counts = [int(n == expert) for n in range(4)]
                    expected += share * layer.experts(row.unsqueeze(0), counts, Pass(0, 0, assembly.gradients))[0]
            torch.testing.assert_close(y.flatten(0, 1)[token], expected, rtol=1e-12, atol=1e-15)
    dropped = (taken == NONE).sum(1)
    assert {0, 1, 2} == set(dropped.tolist())


def test_a_row_that_is_all_padding_adds_nothing_to_the_balance_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, EXPERTS, dtype=torch.float64, generator=generator)  # 3 places of 2 rows
    shares = logits.softmax(-1)
    routing = Routing(logits=logits, shares=shares, chosen=shares.topk(K).indices, weights=shares.topk(K).values)
    real = torch.tensor([True, False]).repeat(3)
    alone = Routing(*(part[::2] for part in (logits, shares, routing.chosen, routing.weights)))
    found = balance_sum(without_padding(routing, real), 2, torch.tensor([3, 0]), ALONE)
    assert float(found) == pytest.approx(float(balance_sum(alone, 1, 3, ALONE)), rel=1e-14)
