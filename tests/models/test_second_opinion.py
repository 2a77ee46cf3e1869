"""A second opinion: Hugging Face's models with the same weights give the same logits, loss and gradients.

Llama, Mistral (which is Llama with a window) and Qwen3. Their implementations narrow to float32 inside (norms, rotary
angles, their own loss), so these places are widened here: to the same formulas in float64.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from compared import Opinion, compare, cover
from our_side import ours
from their_rope import their_config as rope_config
from their_rope import their_scaled
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3

from pool import pool
from small import assembled, boxes, config_of, tokens, whole
from ultrascale.config.schema import Config
from ultrascale.models.rope import inverse_frequencies

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that of the few frequencies of a small head some are kept, some blended and some stretched.
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {"model.num_key_value_heads": 2},
    "tied": {"model.num_key_value_heads": 4, "model.tie_word_embeddings": True, "model.vocab_size": 257},
    "one kv head, rope scaled": {"model.num_key_value_heads": 1, "model.rope_scaling": SCALING},
    "yarn": {"model.rope_scaling": YARN},
    "yarn with mscale": {"model.rope_scaling": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "linear": {"model.rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "sliding window": {"model.num_key_value_heads": 2, "model.sliding_window": 7},
    "qwen3": {"model.family": "qwen3", "model.num_key_value_heads": 2},
    "qwen3, tied, some layers sliding": {
        "model.family": "qwen3",
        "model.tie_word_embeddings": True,
        "model.num_key_value_heads": 1,
        "model.sliding_window": 5,
        "model.layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
    },
    "tied, rope scaled": {
        "model.tie_word_embeddings": True,
        "model.rope_scaling": SCALING,
        "model.rope_theta": 500000.0,
    },
}
SIZE = {"model.hidden_size": 32, "model.head_dim": 16, "model.num_hidden_layers": 3, "batch.sequence_length": 24}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp=2 pp=2": (4, {"parallel.tp": 2, "parallel.pp": 2}),
    "cp=2 tp=2": (4, {"parallel.cp": 2, "parallel.tp": 2}),
    "tp=2 pp=2 without sp": (4, {"parallel.tp": 2, "parallel.pp": 2, "parallel.sequence_parallel": False}),
}


def their_name(name: str) -> str:
    """Hugging Face's name of a logical parameter."""
    for old, new in (
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        (".attention.", ".self_attn."),
    ):
        name = name.replace(old, new)
    return name if name.startswith("lm_head") else f"model.{name}"


def their_classes(config: Config) -> tuple[Any, Any, Any]:
    """(config, model, module of both) of what this model is there."""
    if config.model.family == "qwen3":
        return transformers.Qwen3Config, transformers.Qwen3ForCausalLM, modeling_qwen3
    if config.model.sliding_window is not None:
        return transformers.MistralConfig, transformers.MistralForCausalLM, modeling_mistral
    return transformers.LlamaConfig, transformers.LlamaForCausalLM, modeling_llama


def their_config(config: Config) -> transformers.PreTrainedConfig:
    model = config.model
    more: dict[str, Any] = {}
    if model.sliding_window is not None:
        more["sliding_window"] = model.sliding_window
        if model.layer_types is not None:
            more |= {"layer_types": list(model.layer_types), "use_sliding_window": True}
    return rope_config(
        model,
        kind=their_classes(config)[0],
        **more,
        num_hidden_layers=model.num_hidden_layers,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        tie_word_embeddings=model.tie_word_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        attn_implementation="sdpa",
        use_cache=False,
    )


def their_frequencies(config: Config) -> torch.Tensor:
    """float64 inverse frequencies: unscaled or by the rule of the Llama 3.1 model code, wavelength by wavelength;
    the other kinds are transformers' own."""
    model = config.model
    if model.rope_scaling is not None and model.rope_scaling.rope_type != "llama3":
        return their_scaled(model)[0]
    assert model.head_dim is not None
    frequencies = []
    for i in range(0, model.head_dim, 2):
        frequency = model.rope_theta ** (-i / model.head_dim)
        if (scaling := model.rope_scaling) is not None:
            wavelength = 2 * np.pi / frequency
            low = scaling.original_max_position_embeddings / scaling.low_freq_factor
            high = scaling.original_max_position_embeddings / scaling.high_freq_factor
            if wavelength > low:
                frequency /= scaling.factor
            elif wavelength >= high:
                turns = scaling.original_max_position_embeddings / wavelength
                smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        frequencies.append(frequency)
    return torch.tensor(frequencies, dtype=torch.float64)


def theirs(config: Config, weights: dict[str, np.ndarray]) -> Opinion:
    """Of Hugging Face's model with these weights."""
    frequencies = their_frequencies(config)

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].double() * frequencies
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling

    with pytest.MonkeyPatch.context() as patch:
        _, kind, module = their_classes(config)
        name = kind.__name__.removesuffix("ForCausalLM")
        patch.setattr(getattr(module, f"{name}RMSNorm"), "forward", norm)
        patch.setattr(getattr(module, f"{name}RotaryEmbedding"), "forward", rotary)
        model = kind(their_config(config)).to(torch.float64)
        state = {their_name(name): torch.from_numpy(values) for name, values in weights.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert missing == (["lm_head.weight"] if config.model.tie_word_embeddings else [])
        inputs, labels = tokens(config)
        logits = model(input_ids=inputs.t()).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), ignore_index=-100)
        loss.backward()
    gradients = dict(model.named_parameters())
    found = {name: gradients[their_name(name)].grad for name in weights}
    assert logits.dtype == torch.float64
    return Opinion(
        logits.detach().numpy(),
        {"lm": loss.item()},
        {name: grad.numpy() for name, grad in found.items() if grad is not None},
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


@pytest.mark.parametrize("model", MODELS)
def test_inverse_frequencies_are_those_of_transformers(model: str) -> None:
    config = model_config(model)
    rotary = modeling_llama.LlamaRotaryEmbedding(their_config(config))
    frequencies, factor = inverse_frequencies(config.model)
    assert rotary.attention_scaling == factor
    torch.testing.assert_close(frequencies.float(), rotary.inv_freq, rtol=1e-6, atol=0)
    torch.testing.assert_close(frequencies, their_frequencies(config), rtol=1e-13, atol=0)


def test_scaled_frequencies_are_of_all_three_kinds() -> None:
    """Or the comparison above says nothing about one branch of the rule."""
    model = model_config("tied, rope scaled").model
    scaled, _ = inverse_frequencies(model)
    plain, _ = inverse_frequencies(model.model_copy(update={"rope_scaling": None}))
    stretch = plain / scaled
    assert ((stretch - 1).abs() < 1e-12).any()
    assert ((stretch - 8).abs() < 1e-12).any()
    assert ((stretch > 1.01) & (stretch < 7.99)).any()
