"""A second opinion on mixtures of experts: Hugging Face's Mixtral and Qwen3-MoE with the same weights give the same
logits, loss and gradients, and the same balance of the routers.

Their code runs as it is, but for the places where it narrows to float32: those it finds widened to float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from compared import Opinion, compare, cover, widened
from our_side import ours
from their_rope import their_config as rope_config
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

from pool import pool
from small import assembled, boxes, config_of, tokens, whole
from ultrascale.config.schema import Config

SIZE = {
    "model.hidden_size": 32,
    "model.head_dim": 16,
    "model.num_hidden_layers": 2,
    "model.moe_intermediate_size": 24,
    "batch.sequence_length": 24,
}
MIXTRAL = {"model.family": "mixtral", "model.num_experts": 4}
QWEN = {"model.family": "qwen3_moe", "model.num_experts": 8, "model.num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**MIXTRAL, "model.num_experts_per_tok": 2},
    # The weight of a single expert is 1 whatever the router says: what moves it is its balance.
    "mixtral, one expert, balanced, window": {
        **MIXTRAL,
        "model.num_experts_per_tok": 1,
        "model.router_aux_loss_coef": 0.02,
        "model.sliding_window": 7,
    },
    "qwen3": {**QWEN, "model.num_experts_per_tok": 2},
    "qwen3, not normed": {**QWEN, "model.num_experts_per_tok": 2, "model.norm_topk_prob": False},
    "qwen3, one expert, not normed, tied": {
        **QWEN,
        "model.num_experts_per_tok": 1,
        "model.norm_topk_prob": False,
        "model.tie_word_embeddings": True,
    },
    "qwen3, some layers dense, balanced": {
        **QWEN,
        "model.num_hidden_layers": 4,
        "model.num_experts_per_tok": 2,
        "model.decoder_sparse_step": 2,
        "model.mlp_only_layers": (1,),
        "model.router_aux_loss_coef": 0.02,
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ep=2": (2, {"parallel.ep": 2}),
    "tp=2 ep=2": (4, {"parallel.tp": 2, "parallel.ep": 2}),
    "cp=2": (2, {"parallel.cp": 2}),
}


def their_classes(config: Config) -> tuple[Any, Any, Any]:
    """(config, model, module of both) of what this model is there."""
    if config.model.family == "mixtral":
        return transformers.MixtralConfig, transformers.MixtralForCausalLM, modeling_mixtral
    return transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, modeling_qwen3_moe


def their_config(config: Config) -> transformers.PreTrainedConfig:
    model = config.model
    more: dict[str, Any] = {"sliding_window": model.sliding_window}
    if model.family == "mixtral":
        more |= {"intermediate_size": model.moe_intermediate_size, "num_local_experts": model.num_experts}
    else:
        keys = ("num_experts", "norm_topk_prob", "intermediate_size", "moe_intermediate_size", "decoder_sparse_step")
        more |= {key: getattr(model, key) for key in keys}
        more |= {"mlp_only_layers": list(model.mlp_only_layers)}
    return rope_config(
        model,
        kind=their_classes(config)[0],
        **more,
        num_experts_per_tok=model.num_experts_per_tok,
        num_hidden_layers=model.num_hidden_layers,
        vocab_size=model.vocab_size,
        tie_word_embeddings=model.tie_word_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        attn_implementation="sdpa",
        experts_implementation="eager",
        use_cache=False,
    )


def part_of(config: Config, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Where a parameter of ours lies among theirs, a view: gate and up of all experts of a layer are one tensor."""
    width = config.model.moe_intermediate_size
    assert width is not None
    theirs, rows = name, slice(None)
    for old, new, taken in (
        ("attention_norm", "input_layernorm", rows),
        ("mlp_norm", "post_attention_layernorm", rows),
        (".attention.", ".self_attn.", rows),
        (".moe.router.", ".mlp.gate.", rows),
        (".moe.experts.gate_proj.weight", ".mlp.experts.gate_up_proj", slice(width)),
        (".moe.experts.up_proj.weight", ".mlp.experts.gate_up_proj", slice(width, None)),
        (".moe.experts.down_proj.weight", ".mlp.experts.down_proj", rows),
    ):
        if old in theirs:
            theirs, rows = theirs.replace(old, new), taken
    tensor = tensors[theirs if theirs.startswith("lm_head") else f"model.{theirs}"]
    return tensor[:, rows] if tensor.ndim == 3 else tensor


def their_balance(config: Config, module: ModuleType, logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Their loss of each row and layer by itself, over k, which they do not divide by: a mean over rows, a sum over
    layers.

    logits   of the routers, [batch · seq, experts]
    """
    experts, k = config.model.num_experts, config.model.num_experts_per_tok
    assert k is not None
    rows = [row for layer in logits for row in layer.unflatten(0, (config.batch.global_size, -1))]
    each = [module.load_balancing_loss_func((row,), experts, k) for row in rows]
    return torch.stack(each).sum() / (k * config.batch.global_size)


def theirs(config: Config, weights: Mapping[str, np.ndarray]) -> Opinion:
    """Of Hugging Face's model with these weights."""
    _, kind, module = their_classes(config)
    with widened(module):
        model = kind(their_config(config)).to(torch.float64)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(torch.nan)
            for name, values in weights.items():
                part_of(config, parameters, name).copy_(torch.from_numpy(values))
        inputs, labels = tokens(config)
        out = model(input_ids=inputs.t(), output_router_logits=True)
        assert out.logits.dtype == torch.float64
        terms = {"lm": F.cross_entropy(out.logits.flatten(0, 1), labels.t().flatten(), ignore_index=-100)}
        loss, coefficient = terms["lm"], config.model.router_aux_loss_coef
        if coefficient:
            terms["balance"] = their_balance(config, module, out.router_logits)
            loss = loss + coefficient * terms["balance"]
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    return Opinion(
        out.logits.detach().numpy(),
        {name: term.item() for name, term in terms.items()},
        {name: part_of(config, gradients, name).numpy() for name in weights},
    )


def model_config(model: str, layout: dict[str, Any] | None = None, world: int = 1) -> Config:
    return config_of({**SIZE, **MODELS[model], **(layout or {})}, world)


@cache
def reference(model: str) -> tuple[dict[str, np.ndarray], Opinion]:
    """Our weights of a model, and what Hugging Face makes of them."""
    config = model_config(model)
    weights = whole([boxes(assembled(config), "masters")])
    return weights, theirs(config, weights)


@pytest.mark.parametrize(("model", "layout"), cover(MODELS, LAYOUTS))
def test_transformers_gives_the_same_logits_loss_and_gradients(model: str, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    config = model_config(model, overrides, world)
    ranks = [ours(None, config)] if world == 1 else pool(world).run(ours, config)
    compare(config, ranks, *reference(model))
