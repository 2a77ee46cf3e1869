"""What a config can get wrong about its model, whatever the layout. Needs no torch."""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import re
import sys
from math import floor, pi

from ultrascale.config.model_section import Llama3Scaling, Model, YarnScaling
from ultrascale.config.problem import Problem, choices
from ultrascale.config.schema import Config
from ultrascale.models import check_experts
from ultrascale.models.family import FAMILIES
from ultrascale.models.yarn import blended_pairs, pair_with_turns

LATENT_FAMILY = "deepseek_v3"
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Keys that latent attention cannot do without, with DeepSeek-V3's values."""

_OUTSIDE = re.compile(r"(?P<package>[A-Za-z_]\w*)(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check(config: Config) -> list[Problem]:
    """Problems of the keys `model.*`. Takes a resolved config."""
    model = config.model
    problems = _family(model.family)
    if model.family in FAMILIES and model.options:
        message = f"model.options has no effect under model.family={model.family}; leave it out"
        problems.append(Problem("model.options", message, kind="idle"))
    problems += check_experts.check(config)
    problems += _latent_attention(model)
    key, turned = _turned(model)
    if turned is not None and turned % 2:
        message = (
            f"{key}={turned} is odd, and rotary embeddings turn pairs; "
            f"use {choices([size for size in (turned - 1, turned + 1) if size])}"
        )
        problems.append(Problem(key, message))
    if config.batch.sequence_length > model.max_position_embeddings:
        message = (
            f"batch.sequence_length={config.batch.sequence_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}; use at most "
            f"{model.max_position_embeddings}, or raise model.max_position_embeddings"
        )
        problems.append(Problem("batch.sequence_length", message))
    if isinstance(model.rope_scaling, Llama3Scaling):
        problems += _llama3(model.rope_scaling)
    if isinstance(model.rope_scaling, YarnScaling):
        problems += _yarn(model.rope_scaling, model)
    problems += _further_tokens(model)
    return problems + _window(model)


def _further_tokens(model: Model) -> list[Problem]:
    """A weight without a loss."""
    default = Model.model_fields["mtp_loss_coefficient"].default
    if model.num_nextn_predict_layers or model.mtp_loss_coefficient == default:
        return []
    message = (
        f"model.mtp_loss_coefficient={model.mtp_loss_coefficient:g} has no effect without "
        "model.num_nextn_predict_layers; leave it out, or predict further tokens"
    )
    return [Problem("model.mtp_loss_coefficient", message, kind="idle")]


def _turned(model: Model) -> tuple[str, int | None]:
    """The key, and its value, that says how many features of a head positions turn."""
    name = "head_dim" if model.qk_rope_head_dim is None else "qk_rope_head_dim"
    return f"model.{name}", getattr(model, name)


def _latent_attention(model: Model) -> list[Problem]:
    """What one family has, and needs, and what its heads leave no choice in."""
    given = {name: getattr(model, name) for name in (*LATENT, "q_lora_rank")}
    if model.family in FAMILIES and model.family != LATENT_FAMILY:
        return [
            Problem(
                f"model.{name}",
                f"model.{name}={value} has no effect under model.family={model.family}, whose attention has no "
                f"latents; leave it out, or use model.family={LATENT_FAMILY}",
                kind="idle",
            )
            for name, value in given.items()
            if value is not None
        ]
    if model.family != LATENT_FAMILY:
        return []
    missing = [name for name in LATENT if given[name] is None]
    if missing:
        return [
            Problem(
                f"model.{name}",
                f"model.{name} is not set, and model.family={LATENT_FAMILY} needs it; DeepSeek-V3 has {LATENT[name]}",
            )
            for name in missing
        ]
    problems = []
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    whole = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
    if kv_heads not in (None, heads):
        message = (
            f"model.num_key_value_heads={kv_heads} is not model.num_attention_heads={heads}, and latents are expanded "
            "to as many heads of keys as of queries; leave it out"
        )
        problems.append(Problem("model.num_key_value_heads", message))
    if head_dim not in (None, whole):
        message = (
            f"model.head_dim={head_dim} is not model.qk_nope_head_dim + model.qk_rope_head_dim = {whole}; leave it out"
        )
        problems.append(Problem("model.head_dim", message))
    return problems


def _window(model: Model) -> list[Problem]:
    """Each layer has a type, and a sliding layer a window."""
    types = model.layer_types
    if types is None:
        return []
    if len(types) != model.num_hidden_layers:
        message = f"model.layer_types has {len(types)} entries, and model.num_hidden_layers={model.num_hidden_layers}"
        return [Problem("model.layer_types", f"{message}; give each layer one, or leave it out")]
    if model.sliding_window is None:
        if "sliding_attention" in types:
            message = "model.layer_types names sliding_attention, and model.sliding_window is not set; set it"
            return [Problem("model.sliding_window", message)]
        message = "model.layer_types has no effect without model.sliding_window; leave it out"
        return [Problem("model.layer_types", message, kind="idle")]
    return []


def _llama3(scaling: Llama3Scaling) -> list[Problem]:
    """Problems of the scaling of Llama 3."""
    if scaling.high_freq_factor > scaling.low_freq_factor:
        return []
    message = (
        f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} must be above "
        f"low_freq_factor={scaling.low_freq_factor}; Llama 3.1 has 4 and 1"
    )
    return [Problem("model.rope_scaling.high_freq_factor", message)]


def _yarn(scaling: YarnScaling, model: Model) -> list[Problem]:
    """Problems of YaRN: its formulas have no answer for some numbers, and would turn others round."""
    problems = []
    if scaling.beta_fast <= scaling.beta_slow:
        message = (
            f"model.rope_scaling.beta_fast={scaling.beta_fast:g} must be above beta_slow={scaling.beta_slow:g}; the "
            "paper has 32 and 1"
        )
        problems.append(Problem("model.rope_scaling.beta_fast", message))
    if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        alone, other = ("mscale", "mscale_all_dim") if scaling.mscale_all_dim is None else ("mscale_all_dim", "mscale")
        message = (
            f"model.rope_scaling.{alone}={getattr(scaling, alone):g} has no effect without {other}; give both, as "
            f"DeepSeek's models do, or leave {alone} out"
        )
        problems.append(Problem(f"model.rope_scaling.{alone}", message))
    elif scaling.attention_factor is not None and scaling.mscale is not None:
        message = (
            f"model.rope_scaling.mscale={scaling.mscale:g} and mscale_all_dim have no effect beside "
            f"attention_factor={scaling.attention_factor:g}; leave them out, or the attention_factor"
        )
        problems.append(Problem("model.rope_scaling.mscale", message))
    return problems or _yarn_range(scaling, model)


def _yarn_range(scaling: YarnScaling, model: Model) -> list[Problem]:
    """Whether there are frequencies on both sides of the blend."""
    (_, turned), length = _turned(model), scaling.original_max_position_embeddings
    if turned is None or turned < 2:
        return []
    if model.rope_theta <= 1:
        message = f"model.rope_theta={model.rope_theta:g} must be above 1 under rope_type: yarn; 10000 is usual"
        return [Problem("model.rope_theta", message)]
    key = "model.rope_scaling.original_max_position_embeddings"
    if pair_with_turns(scaling.beta_slow, scaling, model.rope_theta, turned) <= 0:
        least = floor(2 * pi * scaling.beta_slow) + 1
        message = (
            f"{key}={length} is so short that no frequency turns beta_slow={scaling.beta_slow:g} times in it; use at "
            f"least {least}, or rope_type: linear, which divides all of them"
        )
        return [Problem(key, message)]
    kept, _ = blended_pairs(scaling, model.rope_theta, turned)
    if kept >= turned / 2 - 1:
        message = (
            f"{key}={length}: every frequency turns beta_fast={scaling.beta_fast:g} times in it, and yarn divides "
            "none of them; leave rope_scaling out, or use rope_type: linear"
        )
        return [Problem(key, message)]
    return []


def _family(name: str) -> list[Problem]:
    """A family of the tree, or a class outside it whose package this Python can find (it is not imported
    here)."""
    if name in FAMILIES:
        return []
    outside = _OUTSIDE.fullmatch(name)
    if outside is None:
        near = difflib.get_close_matches(name.lower(), FAMILIES, n=1)
        known = f"did you mean {near[0]}?" if near else f"use {choices(list(FAMILIES))}, or package.module:Family"
        return [Problem("model.family", f"model.family={name} is not a family of this version; {known}")]
    package = outside["package"]
    # A built-in or already imported module has no path entry of its own.
    if package in sys.modules or importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]):
        return []
    message = f"model.family={name}: Python finds no package {package}; install it, or add it to PYTHONPATH"
    return [Problem("model.family", message)]
