"""The families of the tree in Hugging Face's words. Another family is another entry of MAPPINGS."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ultrascale.config.problem import choices
from ultrascale.models.hugging_face import REQUIRED, FamilyMapping, Field, HuggingFaceError, Parameter

LLAMA = FamilyMapping(
    family="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields=(
        Field("hidden_size", "hidden_size", REQUIRED),
        Field("num_hidden_layers", "num_hidden_layers", REQUIRED),
        Field("num_attention_heads", "num_attention_heads", REQUIRED),
        Field("num_key_value_heads", "num_key_value_heads", None),
        Field("head_dim", "head_dim", None),
        Field("intermediate_size", "intermediate_size", REQUIRED),
        Field("vocab_size", "vocab_size", REQUIRED),
        Field("tie_word_embeddings", "tie_word_embeddings", False),
        Field("max_position_embeddings", "max_position_embeddings", 2048),
        Field("rms_norm_eps", "rms_norm_eps", 1e-6),
        Field("initializer_range", "initializer_range", 0.02),
    ),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "quantization_config": None,
    },
    # q and k need no permutation: both sides rotate the two halves of a head (kernels/reference.py, rotate).
    parameters=(
        Parameter("embed_tokens.weight", "model.embed_tokens.weight", ("vocabulary", "hidden")),
        *(
            Parameter(f"layers.{{layer}}.{ours}.weight", f"model.layers.{{layer}}.{theirs}.weight", shape)
            for ours, theirs, shape in (
                ("attention_norm", "input_layernorm", ("hidden",)),
                ("attention.q_proj", "self_attn.q_proj", ("queries", "hidden")),
                ("attention.k_proj", "self_attn.k_proj", ("keys", "hidden")),
                ("attention.v_proj", "self_attn.v_proj", ("keys", "hidden")),
                ("attention.o_proj", "self_attn.o_proj", ("hidden", "queries")),
                ("mlp_norm", "post_attention_layernorm", ("hidden",)),
                ("mlp.gate_proj", "mlp.gate_proj", ("features", "hidden")),
                ("mlp.up_proj", "mlp.up_proj", ("features", "hidden")),
                ("mlp.down_proj", "mlp.down_proj", ("hidden", "features")),
            )
        ),
        Parameter("norm.weight", "model.norm.weight", ("hidden",)),
        Parameter("lm_head.weight", "lm_head.weight", ("vocabulary", "hidden"), tied_to="embed_tokens.weight"),
    ),
    not_read=("rotary_emb.inv_freq",),
)

MAPPINGS = (LLAMA,)


def of_family(name: str) -> FamilyMapping:
    """The mapping of a `model.family`; raises HuggingFaceError when it has none."""
    for mapping in MAPPINGS:
        if mapping.family == name:
            return mapping
    known = choices([mapping.family for mapping in MAPPINGS])
    raise HuggingFaceError(f"model.family={name} has no mapping to Hugging Face; {known} has one")


def of_config(config: Mapping[str, Any]) -> FamilyMapping:
    """The mapping of the architecture that a config.json names; raises HuggingFaceError when it is not known."""
    named = config.get("architectures") or []
    architecture = named[0] if isinstance(named, list) and named else None
    for mapping in MAPPINGS:
        if architecture == mapping.architecture or (
            architecture is None and config.get("model_type") == mapping.model_type
        ):
            return mapping
    known = [mapping.architecture for mapping in MAPPINGS]
    near = difflib.get_close_matches(str(architecture), known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"{choices(known)} can be read"
    what = f"architectures={named!r}" if named else f"model_type={config.get('model_type')!r}"
    raise HuggingFaceError(f"config.json: {what} is not known; {fix}")
