"""The families of the tree in Hugging Face's words. Another family is another entry of MAPPINGS."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ultrascale.config.model_section import Model
from ultrascale.config.problem import choices
from ultrascale.models.hugging_face import (
    REQUIRED,
    FamilyMapping,
    Field,
    HuggingFaceError,
    Loaded,
    Parameter,
    Window,
)
from ultrascale.models.hugging_face_config import unsaid

# What transformers fills in differs between architectures; real folders say all of it.
_LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0}


_EXPERTS, _EXPERTS_BACK = ("experts", "expert features", "hidden"), ("experts", "hidden", "expert features")


def _fields(**defaults: Any) -> tuple[Field, ...]:
    """Fields that have the same name on both sides, with what an architecture fills in otherwise than Llama."""
    sizes = tuple(Field(name, name, REQUIRED) for name in _SIZES)
    return sizes + tuple(Field(name, name, value) for name, value in {**_LLAMA_DEFAULTS, **defaults}.items())


def _of_layer(ours: str, theirs: str, shape: tuple[str, ...], **more: Any) -> Parameter:
    """A weight of every layer."""
    return Parameter(f"layers.{{layer}}.{ours}.weight", f"model.layers.{{layer}}.{theirs}.weight", shape, **more)


def _attention(name: str, *shape: str, **more: Any) -> Parameter:
    """A weight of every layer's attention, which has the same name on both sides."""
    return _of_layer(f"attention.{name}", f"self_attn.{name}", shape, **more)


# q and k need no permutation: both sides rotate the two halves of a head (kernels/reference.py, rotate).
_GROUPED_QUERIES = (
    _attention("q_proj", "queries", "hidden"),
    _attention("k_proj", "keys", "hidden"),
    _attention("v_proj", "keys", "hidden"),
    _attention("o_proj", "hidden", "queries"),
)
_HEAD_NORMS = (_attention("q_norm", "head"), _attention("k_norm", "head"))
_LATENT = (
    _attention("q_proj", "queries without latent", "hidden", turned=("head", "unturned")),
    _attention("q_a_proj", "query latent", "hidden"),
    _attention("q_a_layernorm", "query latent"),
    _attention("q_b_proj", "queries", "query latent", turned=("head", "unturned")),
    _attention("kv_a_proj_with_mqa", "latent and shared key", "hidden", turned=("latent and shared key", "latent")),
    _attention("kv_a_layernorm", "latent"),
    _attention("kv_b_proj", "keys and values", "latent"),
    _attention("o_proj", "hidden", "values"),
)


def _parameters(
    *more: Parameter, attention: tuple[Parameter, ...] = _GROUPED_QUERIES, mixture: tuple[Parameter, ...] = ()
) -> tuple[Parameter, ...]:
    """A decoder's parameters.

    more     what layers have beside Llama's
    mixture  what sparse layers have in place of gate, up and down
    """
    return (
        Parameter("embed_tokens.weight", "model.embed_tokens.weight", ("vocabulary", "hidden")),
        _of_layer("attention_norm", "input_layernorm", ("hidden",)),
        *attention,
        *more,
        _of_layer("mlp_norm", "post_attention_layernorm", ("hidden",)),
        _of_layer("mlp.gate_proj", "mlp.gate_proj", ("features", "hidden"), sparse=False),
        _of_layer("mlp.up_proj", "mlp.up_proj", ("features", "hidden"), sparse=False),
        _of_layer("mlp.down_proj", "mlp.down_proj", ("hidden", "features"), sparse=False),
        *mixture,
        Parameter("norm.weight", "model.norm.weight", ("hidden",)),
        Parameter("lm_head.weight", "lm_head.weight", ("vocabulary", "hidden"), tied_to="embed_tokens.weight"),
    )


def _mixture(block: str, gate: str, up: str, down: str) -> tuple[Parameter, ...]:
    """Router and experts, by the names that folders have for the block and, in it, an expert's three matrices.

    transformers holds all experts of a layer in two tensors, gate above up.
    """
    layer = "model.layers.{layer}"
    held = f"{layer}.mlp.experts"

    def expert(ours: str, theirs: str, shape: tuple[str, ...], loaded: Loaded) -> Parameter:
        name = f"{layer}.{block}.experts.{{expert}}.{theirs}.weight"
        return Parameter(f"layers.{{layer}}.moe.experts.{ours}.weight", name, shape, sparse=True, loaded=loaded)

    return (
        Parameter(
            "layers.{layer}.moe.router.weight",
            f"{layer}.{block}.gate.weight",
            ("experts", "hidden"),
            sparse=True,
            loaded=Loaded(f"{layer}.mlp.gate.weight"),
        ),
        expert("gate_proj", gate, _EXPERTS, Loaded(f"{held}.gate_up_proj", 0, 2)),
        expert("up_proj", up, _EXPERTS, Loaded(f"{held}.gate_up_proj", 1, 2)),
        expert("down_proj", down, _EXPERTS_BACK, Loaded(f"{held}.down_proj")),
    )


_BIAS_AND_SHARED = (
    Parameter(
        "layers.{layer}.moe.router.bias",
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        ("balanced experts",),
        sparse=True,
        wide=True,
    ),
    *(
        _of_layer(f"moe.shared_experts.{name}", f"mlp.shared_experts.{name}", shape, sparse=True)
        for name, shape in (
            ("gate_proj", ("shared features", "hidden")),
            ("up_proj", ("shared features", "hidden")),
            ("down_proj", ("hidden", "shared features")),
        )
    ),
)

# What layers behind the decoder's have beside a layer's own; embedding and head lie there again.
_FURTHER = (
    _of_layer("enorm", "enorm", ("hidden",), behind=True),
    _of_layer("hnorm", "hnorm", ("hidden",), behind=True),
    _of_layer("eh_proj", "eh_proj", ("hidden", "two hidden"), behind=True),
    _of_layer("norm", "shared_head.norm", ("hidden",), behind=True),
)
_COPIED = (
    ("model.layers.{layer}.embed_tokens.weight", "embed_tokens.weight"),
    ("model.layers.{layer}.shared_head.head.weight", "lm_head.weight"),
)

LLAMA = FamilyMapping(
    family="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields=_fields(),
    parameters=_parameters(),
    fixed={**_FIXED, "attention_bias": False, "mlp_bias": False},
    not_read=("rotary_emb.inv_freq",),
)

# Llama with a window over all layers.
MISTRAL = FamilyMapping(
    family="llama",
    architecture="MistralForCausalLM",
    model_type="mistral",
    fields=_fields(num_key_value_heads=8, max_position_embeddings=131072),
    parameters=_parameters(),
    window=Window(default=4096, switched=False, by_layer=False),
    fixed=_FIXED,
)

QWEN3 = FamilyMapping(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fields=_fields(num_key_value_heads=32, head_dim=128, max_position_embeddings=32768),
    parameters=_parameters(*_HEAD_NORMS),
    window=Window(default=4096, switched=True, by_layer=True),
    fixed={**_FIXED, "attention_bias": False},
)

# Its one width is that of experts: no layer is dense.
MIXTRAL = FamilyMapping(
    family="mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fields=(
        *_fields(
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.001,
        ),
        Field("num_experts", "num_local_experts", 8),
        Field("moe_intermediate_size", "intermediate_size", REQUIRED),
    ),
    parameters=_parameters(mixture=_mixture("block_sparse_moe", "w1", "w3", "w2")),
    window=Window(default=None, switched=False, by_layer=False),
    theta=1e6,
    fixed={**_FIXED, "router_jitter_noise": 0.0},
)

QWEN3_MOE = FamilyMapping(
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields=(
        *_fields(
            num_key_value_heads=4,
            max_position_embeddings=32768,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=False,
            decoder_sparse_step=1,
            mlp_only_layers=(),
            router_aux_loss_coef=0.001,
        ),
        Field("num_experts", "num_experts", 128, also="num_local_experts"),
    ),
    parameters=_parameters(*_HEAD_NORMS, mixture=_mixture("mlp", "gate_proj", "up_proj", "down_proj")),
    window=Window(default=4096, switched=True, by_layer=False),
    fixed={**_FIXED, "attention_bias": False},
)

# Its experts are chosen by sigmoid scores with a bias; head_dim there is that of the part that positions turn.
DEEPSEEK_V3 = FamilyMapping(
    family="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    fields=(
        *(
            one
            for one in _fields(
                max_position_embeddings=4096,
                q_lora_rank=1536,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                num_experts_per_tok=8,
                moe_intermediate_size=2048,
                n_shared_experts=1,
                first_k_dense_replace=3,
                norm_topk_prob=True,
                routed_scaling_factor=2.5,
                n_group=8,
                topk_group=4,
            )
            if one.ours != "head_dim"
        ),
        Field("num_experts", "n_routed_experts", 256, also="num_local_experts"),
        Field("num_nextn_predict_layers", "num_nextn_predict_layers", 1, also="num_mtp_layers"),
    ),
    parameters=_parameters(
        *_FURTHER,
        attention=_LATENT,
        mixture=(*_mixture("mlp", "gate_proj", "up_proj", "down_proj"), *_BIAS_AND_SHARED),
    ),
    fixed={**_FIXED, "attention_bias": False},
    unsaid={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    implied={"scoring_func": "sigmoid", "router_bias_update_rate": 0.0},
    needed=("num_experts", "n_shared_experts", "router_bias_update_rate"),
    pairs="rope_interleave",
    copied=_COPIED,
)

MAPPINGS = (LLAMA, MISTRAL, QWEN3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)
"""Of several for one family, the first that has a word for everything is written."""


def of_model(model: Model) -> FamilyMapping:
    """The mapping that a resolved model is written by; raises HuggingFaceError when none has words for all of it."""
    of_family = [mapping for mapping in MAPPINGS if mapping.family == model.family]
    if not of_family:
        known = choices(list(dict.fromkeys(mapping.family for mapping in MAPPINGS)))
        raise HuggingFaceError(f"model.family={model.family} has no mapping to Hugging Face; {known} has one")
    for mapping in of_family:
        if not unsaid(mapping, model):
            return mapping
    lacking = "; ".join(f"{mapping.architecture} has no {', '.join(unsaid(mapping, model))}" for mapping in of_family)
    raise HuggingFaceError(f"model.family={model.family} cannot be written with these settings: {lacking}")


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
    near = difflib.get_close_matches(str(architecture), known, n=1, cutoff=0.8)
    fix = f"did you mean {near[0]}?" if near else f"{choices(known)} can be read"
    what = f"architectures={named!r}" if named else f"model_type={config.get('model_type')!r}"
    raise HuggingFaceError(f"config.json: {what} is not known; {fix}")
