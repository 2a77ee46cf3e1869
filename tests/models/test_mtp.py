"""Multi-token prediction against its formula, written out for whole tensors: DeepSeek-V3 (2024), equations 21 to 25."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from small import assembled, boxes, config_of, whole
from ultrascale.config.schema import Config
from ultrascale.data.loader import Data
from ultrascale.models import check
from ultrascale.models.family import load_family
from ultrascale.models.sizes import tied, tied_on
from ultrascale.step import evaluate, step_batch, train_step

DEPTHS, HEADS = 2, 4
MODELS: dict[str, dict[str, Any]] = {
    "apart": {},
    "tied, grouped heads": {"model.tie_word_embeddings": True, "model.num_key_value_heads": 1},
}
Weights = dict[str, torch.Tensor]


def configured(**overrides: Any) -> Config:
    depths = {"model.num_nextn_predict_layers": DEPTHS, "model.mtp_loss_coefficient": 0.7, "batch.sequence_length": 12}
    return config_of({**depths, "batch.micro_size": 2, **overrides})


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [batch, heads, seq, head_dim], as pairs (i, i + head_dim / 2) of complex numbers."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], dtype=torch.float64)
    angles = places[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def layer(x: torch.Tensor, weights: Weights, name: str, config: Config) -> torch.Tensor:
    """x [batch, seq, hidden] through one Llama block."""
    model = config.model

    def heads(part: str) -> torch.Tensor:
        return (normed @ weights[f"{name}.attention.{part}_proj.weight"].t()).unflatten(-1, (-1, 4)).transpose(1, 2)

    normed = norm(x, weights[f"{name}.attention_norm.weight"], model.rms_norm_eps)
    q, k, v = turned(heads("q"), model.rope_theta), turned(heads("k"), model.rope_theta), heads("v")
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    x = x + mixed @ weights[f"{name}.attention.o_proj.weight"].t()
    normed = norm(x, weights[f"{name}.mlp_norm.weight"], model.rms_norm_eps)
    gate, up, down = (weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return x + (F.silu(normed @ gate.t()) * (normed @ up.t())) @ down.t()


def by_formula(config: Config, weights: Weights, texts: torch.Tensor, live: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean loss of each depth.

    texts   int64 [batch, seq + 1 + depths]
    live    bool, alike: which tokens are targets
    """
    model, length = config.model, config.batch.sequence_length
    embedding = weights["embed_tokens.weight"]
    head = embedding if model.tie_word_embeddings else weights["lm_head.weight"]
    x = embedding[texts[:, :length]]
    for index in range(model.num_hidden_layers):
        x = layer(x, weights, f"layers.{index}", config)
    hidden = norm(x, weights["norm.weight"], model.rms_norm_eps)
    losses = {}
    for depth in range(1 + DEPTHS):
        if depth:
            name = f"mtp.{depth - 1}"
            token = norm(
                embedding[texts[:, depth : depth + length]], weights[f"{name}.enorm.weight"], model.rms_norm_eps
            )
            before = norm(hidden, weights[f"{name}.hnorm.weight"], model.rms_norm_eps)
            x = torch.cat((token, before), -1) @ weights[f"{name}.eh_proj.weight"].t()
            hidden = norm(layer(x, weights, name, config), weights[f"{name}.norm.weight"], model.rms_norm_eps)
        part = slice(depth + 1, depth + 1 + length)
        targets = texts[:, part].masked_fill(~live[:, part], -100)
        total = F.cross_entropy(
            (hidden @ head.t()).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        losses[f"aux_mtp_{depth}" if depth else "lm_loss"] = total / (targets != -100).sum()
    return losses


@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_those_of_the_formula(model: str) -> None:
    config = configured(**MODELS[model])
    assembly = assembled(config)
    weights = {
        name: torch.from_numpy(value).requires_grad_() for name, value in whole([boxes(assembly, "masters")]).items()
    }
    data = Data(config)
    samples = [data._train.read(np.array([number]))[0] for number in range(config.batch.global_size)]
    texts, live = (torch.from_numpy(np.stack([getattr(s, name) for s in samples])) for name in ("tokens", "live"))
    losses = by_formula(config, weights, texts, live)
    objective = losses["lm_loss"] + 0.7 * (losses["aux_mtp_1"] + losses["aux_mtp_2"]) / 2
    objective.backward()

    result = train_step(assembly, step_batch(assembly, data.batch(1, 0, 1, config.batch.micro_size)), 1)
    assert result.report == pytest.approx(
        {"loss": objective.item(), **{k: v.item() for k, v in losses.items()}}, rel=1e-12
    )
    gradients = whole([boxes(assembly, "gradients")])
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(torch.from_numpy(gradients[name]), weight.grad, rtol=1e-9, atol=1e-13, msg=name)


def test_a_model_that_looks_further_is_trained_and_judged_on_the_same_samples() -> None:
    further, plain = (
        Data(configured()),
        Data(configured(**{"model.num_nextn_predict_layers": 0, "model.mtp_loss_coefficient": 0.3})),
    )
    for ours, theirs in zip(further.batch(2, 0, 1, 2), plain.batch(2, 0, 1, 2), strict=True):
        for name in ("inputs", "labels", "samples"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert not theirs.further_inputs
        np.testing.assert_array_equal(ours.further_inputs[0][:-1], ours.inputs[1:])
        np.testing.assert_array_equal(ours.further_inputs[1][:-2], ours.inputs[2:])
    assembly = assembled(configured(**{"data.validation": "builtin:uneven"}))
    batch = step_batch(assembly, further.batch(1, 0, 1, 2))
    assert evaluate(assembly, [batch]) == pytest.approx(train_step(assembly, batch, 1).report["lm_loss"], rel=1e-12)


def test_the_coefficient_changes_the_weight_of_the_depths_and_nothing_else() -> None:
    reports = []
    for coefficient in (0.0, 0.5):
        config = configured(**{"model.mtp_loss_coefficient": coefficient})
        assembly = assembled(config)
        reports.append(train_step(assembly, step_batch(assembly, Data(config).batch(1, 0, 1, 2)), 1).report)
    none, half = reports
    assert none["loss"] == none["lm_loss"]
    assert {k: v for k, v in none.items() if k != "loss"} == {k: v for k, v in half.items() if k != "loss"}
    assert half["loss"] == pytest.approx(half["lm_loss"] + 0.5 * (half["aux_mtp_1"] + half["aux_mtp_2"]) / 2, rel=1e-14)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_built_behind_the_layers_is_the_closed_form(family: str, tie: bool) -> None:
    config = configured(**{"model.family": family, "model.tie_word_embeddings": tie})
    sizes = load_family(family)(config).sizes()
    built = whole([boxes(assembled(config), "masters")])
    behind = sum(value.size for name, value in built.items() if name.startswith("mtp."))
    assert sizes.mtp_parameters == behind
    assert sizes.parameters == sum(value.size for value in built.values()) - behind


def test_a_tie_names_every_use_and_the_stages_that_hold_it() -> None:
    apart, alone = configured().model, config_of().model
    assert tied(apart) == {
        "embed_tokens": ("embed_tokens.weight", "mtp.0.embed_tokens.weight", "mtp.1.embed_tokens.weight"),
        "lm_head": ("lm_head.weight", "mtp.0.lm_head.weight", "mtp.1.lm_head.weight"),
    }
    assert tied_on(apart) == {"embed_tokens": (0, -1), "lm_head": (-1,)}
    assert tied(alone) == {}
    (names,) = tied(configured(**{"model.tie_word_embeddings": True}).model).values()
    assert names[0] == "embed_tokens.weight"
    assert len(names) == 6


def test_a_weight_without_depths_is_said_to_be_idle() -> None:
    key = "model.mtp_loss_coefficient"
    (found,) = [problem for problem in check.check(config_of({key: 0.1})) if problem.key == key]
    assert found.kind == "idle"
    assert "model.num_nextn_predict_layers" in found.message
    assert key not in [problem.key for problem in check.check(configured(**{key: 0.1}))]
