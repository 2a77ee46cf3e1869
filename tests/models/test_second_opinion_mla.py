"""A second opinion on multi-head latent attention: transformers' DeepSeek-V3, its layers dense or sparse.

Its rotation pairs neighbouring features (rope_interleave) or halves; ours pairs halves, so the rows of weights that
make rope parts are reordered for it, and nothing else is. Places where it narrows to float32 are widened, as in
test_second_opinion.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compared import Opinion, compare, cover, widened
from our_side import ours
from their_rope import their_config as rope_config
from their_rope import their_scaled
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

from pool import pool
from small import assembled, boxes, config_of, tokens, whole
from ultrascale.config.model_section import Model
from ultrascale.config.schema import Config
from ultrascale.models.family import load_family
from ultrascale.models.sizes import attention_sizes

SIZE = {
    "model.family": "deepseek_v3",
    "model.num_key_value_heads": None,
    "model.hidden_size": 24,
    "model.kv_lora_rank": 10,
    "model.qk_nope_head_dim": 6,
    "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 7,
    "model.rms_norm_eps": 1e-3,  # not that of the latents
    "batch.sequence_length": 24,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "as V3": {"model.q_lora_rank": 12, "model.rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "as V2-Lite, tied": {"model.tie_word_embeddings": True, "model.rope_scaling": YARN},
    "wide values, halves": {"model.q_lora_rank": 9, "model.v_head_dim": 18},
}
SPARSE = {
    "model.q_lora_rank": 12,
    "model.num_experts": 8,
    "model.num_experts_per_tok": 3,
    "model.moe_intermediate_size": 10,
    "model.n_shared_experts": 2,
    "model.first_k_dense_replace": 1,
    "model.scoring_func": "sigmoid",
    "model.routed_scaling_factor": 2.5,
    "model.n_group": 4,
    "model.topk_group": 2,
    "model.router_bias_update_rate": 0.0,
}
MODELS["as V3, sparse"] = SPARSE
INTERLEAVED = {"as V3": True, "as V2-Lite, tied": True, "wide values, halves": False, "as V3, sparse": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp=2 pp=2": (4, {"parallel.tp": 2, "parallel.pp": 2}),
    "cp=2 tp=2 without sp": (4, {"parallel.cp": 2, "parallel.tp": 2, "parallel.sequence_parallel": False}),
}


def their_name(name: str) -> str:
    """Hugging Face's name of a logical parameter."""
    for old, new in (
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        (".attention.", ".self_attn."),
        (".moe.router.bias", ".mlp.gate.e_score_correction_bias"),
        (".moe.router.", ".mlp.gate."),
        (".moe.", ".mlp."),
    ):
        name = name.replace(old, new)
    return name if name.startswith("lm_head") else f"model.{name}"


def part_of(tensors: Any, name: str, model: Model) -> torch.Tensor:
    """Where a parameter of ours lies among theirs, a view: gate and up of all experts of a layer are one tensor."""
    theirs = their_name(name)
    for old, first in ((".experts.gate_proj.weight", True), (".experts.up_proj.weight", False)):
        if theirs.endswith(old):
            gate, up = tensors[theirs.replace(old, ".experts.gate_up_proj")].split(model.moe_intermediate_size, dim=1)
            return gate if first else up
    return tensors[theirs.replace(".experts.down_proj.weight", ".experts.down_proj")]


def their_rows(name: str, model: Model, interleaved: bool) -> np.ndarray | slice:
    """Which of our rows are theirs, in their order."""
    assert model.qk_rope_head_dim is not None
    assert model.kv_lora_rank is not None
    halves = np.arange(model.qk_rope_head_dim).reshape(2, -1)
    pairs = halves.T.flatten() if interleaved else halves.flatten()
    if name.endswith("kv_a_proj_with_mqa.weight"):
        return np.concatenate((np.arange(model.kv_lora_rank), model.kv_lora_rank + pairs))
    if name.endswith(("q_proj.weight", "q_b_proj.weight")):
        assert model.qk_nope_head_dim is not None
        head = np.concatenate((np.arange(model.qk_nope_head_dim), model.qk_nope_head_dim + pairs))
        return np.concatenate([head + len(head) * i for i in range(model.num_attention_heads)])
    return slice(None)


def their_config(model: Model, interleaved: bool) -> DeepseekV3Config:
    return rope_config(
        model,
        kind=DeepseekV3Config,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        rope_interleave=interleaved,
        first_k_dense_replace=model.first_k_dense_replace if model.num_experts else model.num_hidden_layers,
        n_routed_experts=model.num_experts or 8,
        num_experts_per_tok=model.num_experts_per_tok or 1,
        moe_intermediate_size=model.moe_intermediate_size or 8,
        n_shared_experts=model.n_shared_experts or 1,
        routed_scaling_factor=model.routed_scaling_factor,
        n_group=model.n_group,
        topk_group=model.topk_group,
        norm_topk_prob=model.norm_topk_prob,
        experts_implementation="eager",
        num_hidden_layers=model.num_hidden_layers,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        tie_word_embeddings=model.tie_word_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        attn_implementation="sdpa",
        use_cache=False,
    )


def their_rotation(model: Model) -> tuple[torch.Tensor, float]:
    """float64 inverse frequencies of the rope part, and the factor on cos and sin."""
    rope = model.qk_rope_head_dim
    assert rope is not None
    if model.rope_scaling is not None:
        return their_scaled(model.model_copy(update={"head_dim": rope}))
    return model.rope_theta ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope), 1.0


def theirs(config: Config, weights: dict[str, np.ndarray], interleaved: bool) -> tuple[Opinion, int]:
    """What transformers' model makes of these weights, and how many parameters it has."""
    frequencies, factor = their_rotation(config.model)

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].double() * frequencies
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * factor, angle.sin() * factor

    rows = {name: their_rows(name, config.model, interleaved) for name in weights}
    with pytest.MonkeyPatch.context() as patch, widened(modeling):
        patch.setattr(modeling.DeepseekV3RMSNorm, "forward", norm)
        patch.setattr(modeling.DeepseekV3RotaryEmbedding, "forward", rotary)
        model = DeepseekV3ForCausalLM(their_config(config.model, interleaved)).to(torch.float64)
        state = model.state_dict()
        for name, values in weights.items():
            part_of(state, name, config.model).copy_(torch.from_numpy(values[rows[name]]))
        inputs, labels = tokens(config)
        logits = model(input_ids=inputs.t()).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), ignore_index=-100)
        loss.backward()
    assert logits.dtype == torch.float64
    found, gradients = dict(model.named_parameters()), {}
    for name, values in weights.items():
        gradient = part_of({key: parameter.grad for key, parameter in found.items()}, name, config.model)
        gradients[name] = np.empty_like(values)
        gradients[name][rows[name]] = gradient.numpy()
    opinion = Opinion(logits.detach().numpy(), {"lm": loss.item()}, gradients)
    return opinion, sum(parameter.numel() for parameter in model.parameters())


def model_config(model: str, layout: dict[str, Any] | None = None, world: int = 1) -> Config:
    return config_of({**SIZE, **MODELS[model], **(layout or {})}, world)


@cache
def reference(model: str) -> tuple[dict[str, np.ndarray], Opinion, int]:
    """Our weights of a model, what transformers makes of them, and its number of parameters."""
    config = model_config(model)
    weights = whole([boxes(assembled(config), "masters")])
    return weights, *theirs(config, weights, INTERLEAVED[model])


@pytest.mark.parametrize(("model", "layout"), cover(MODELS, LAYOUTS))
def test_transformers_gives_the_same_logits_loss_and_gradients(model: str, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    config = model_config(model, overrides, world)
    ranks = [ours(None, config)] if world == 1 else pool(world).run(ours, config)
    weights, opinion, _ = reference(model)
    compare(config, ranks, weights, opinion)


@pytest.mark.parametrize("model", MODELS)
def test_as_many_parameters_are_built_as_transformers_has_and_the_closed_form_says(model: str) -> None:
    config = model_config(model)
    weights, _, count = reference(model)
    assert sum(values.size for values in weights.values()) == count
    assert load_family("deepseek_v3")(config).sizes().parameters == count


PUBLISHED: dict[str, dict[str, Any]] = {
    "V3": {"q_lora_rank": 1536, "hidden_size": 7168, "num_attention_heads": 128},
    "V2-Lite": {"q_lora_rank": None, "hidden_size": 2048, "num_attention_heads": 16},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_attention_of_the_published_sizes_has_the_parameters_of_transformers(name: str) -> None:
    heads = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes = {f"model.{key}": value for key, value in {**heads, **PUBLISHED[name]}.items()}
    model = config_of({**SIZE, **sizes}).model
    with torch.device("meta"):
        layer = modeling.DeepseekV3Attention(their_config(model, interleaved=True), 0)
    counted = {key: parameter.numel() for key, parameter in layer.named_parameters()}
    norms = sum(count for key, count in counted.items() if "norm" in key)
    found = attention_sizes(model)
    assert (found.matrices, found.norms) == (sum(counted.values()) - norms, norms)
    assert found.width == model.num_attention_heads * (192 + 128)
