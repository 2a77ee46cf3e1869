"""Parameter counts and FLOPs in closed form, from the config alone (no torch)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ultrascale.config.model_section import Model
from ultrascale.config.schema import Config


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder-only model."""

    parameters: int
    """Logical parameters, ties counted once."""
    matmul_parameters: int
    """Those that a token is multiplied with: no embedding, no norms; the head counts, tied or not, for each token that
    is predicted."""
    attention_width: int
    """Σ over layers of heads · (query and key head size + value head size): 2 · width FLOPs per (query, key) pair."""
    active_parameters: int
    """Those that one token meets: of the experts only the chosen and the shared ones."""
    mtp_parameters: int
    """Of the layers that predict further tokens, which no other field counts but the two of products: `parameters` and
    these are all that is built."""

    def plus_norms(self, model: Model, parameters: int) -> Sizes:
        """With further vectors in every layer, that every token meets."""
        layers, further = model.num_hidden_layers, model.num_nextn_predict_layers
        return replace(
            self,
            parameters=self.parameters + layers * parameters,
            active_parameters=self.active_parameters + layers * parameters,
            mtp_parameters=self.mtp_parameters + further * parameters,
        )


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Of one layer's attention."""

    matrices: int
    """Parameters that a token is multiplied with."""
    norms: int
    width: int
    """Heads · (query and key head size + value head size)."""


def attention_sizes(model: Model) -> AttentionSizes:
    """Grouped-query attention: q, k, v and o. Latent attention, where there is a latent."""
    if model.kv_lora_rank is not None:
        return _latent_attention_sizes(model, model.kv_lora_rank)
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    assert kv_heads is not None
    assert head_dim is not None
    return AttentionSizes(2 * model.hidden_size * (heads + kv_heads) * head_dim, 0, 2 * heads * head_dim)


def _latent_attention_sizes(model: Model, kv_rank: int) -> AttentionSizes:
    """Multi-head latent attention: latents (with the shared key beside that of keys and values) down and up, and o."""
    nope, rope, value_dim = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    assert nope is not None
    assert rope is not None
    assert value_dim is not None
    hidden, heads, q_rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    queries = heads * (nope + rope)
    matrices = hidden * queries if q_rank is None else q_rank * (hidden + queries)
    matrices += hidden * (kv_rank + rope) + kv_rank * heads * (nope + value_dim)
    matrices += hidden * heads * value_dim
    return AttentionSizes(matrices, (q_rank or 0) + kv_rank, heads * (nope + rope + value_dim))


def llama_sizes(config: Config) -> Sizes:
    """Llama, and families that differ from it in attention alone: per layer attention, gate, up, down and two norms;
    embedding, final norm, head unless tied."""
    model = config.model
    attention, hidden = attention_sizes(model), model.hidden_size
    mlp = 3 * hidden * model.intermediate_size
    layers, further = model.num_hidden_layers, model.num_nextn_predict_layers
    vocabulary = model.vocab_size * hidden
    layer = attention.matrices + attention.norms + mlp + 2 * hidden
    parameters = vocabulary * (1 if model.tie_word_embeddings else 2) + layers * layer + hidden
    joined = 2 * hidden**2  # what makes one hidden state of two
    return Sizes(
        parameters=parameters,
        matmul_parameters=layers * (attention.matrices + mlp)
        + vocabulary
        + further * (attention.matrices + mlp + joined + vocabulary),
        attention_width=(layers + further) * attention.width,
        active_parameters=parameters,
        mtp_parameters=further * (layer + joined + 3 * hidden),  # and a norm of each of the two, and the head's
    )


def tied(model: Model) -> dict[str, tuple[str, ...]]:
    """Tie group → names of what is one parameter: embedding and head, where the model says so, and the uses of both in
    layers that predict further tokens. The first is the name that it has."""
    further = [layer_name(model, layer) for layer in all_layers(model)[model.num_hidden_layers :]]
    embeddings = ("embed_tokens.weight", *(f"{name}.embed_tokens.weight" for name in further))
    heads = ("lm_head.weight", *(f"{name}.lm_head.weight" for name in further))
    if model.tie_word_embeddings:
        return {"word_embeddings": (*embeddings, *heads)}
    return {"embed_tokens": embeddings, "lm_head": heads} if further else {}


def tied_on(model: Model) -> dict[str, tuple[int, ...]]:
    """Tie group → the stages that use it, the first (0) or the last (−1)."""
    return {group: (-1,) if group == "lm_head" else (0, -1) for group in tied(model)}


def all_layers(model: Model) -> range:
    """Indices of the decoder's layers, and behind them of the layers that predict further tokens."""
    return range(model.num_hidden_layers + model.num_nextn_predict_layers)


def layer_name(model: Model, layer: int) -> str:
    """What the logical names of a layer's parameters begin with."""
    further = layer - model.num_hidden_layers
    return f"layers.{layer}" if further < 0 else f"mtp.{further}"


def _like(model: Model, layer: int) -> int:
    """The decoder's layer that a layer is made like: itself, or the last for those that predict further tokens."""
    return min(layer, model.num_hidden_layers - 1)


def is_sparse(model: Model, layer: int) -> bool:
    """Whether a layer has experts in place of one feed-forward block."""
    layer = _like(model, layer)
    return (
        model.num_experts is not None
        and layer >= model.first_k_dense_replace
        and layer not in model.mlp_only_layers
        and (layer + 1) % model.decoder_sparse_step == 0
    )


def moe_sizes(config: Config) -> Sizes:
    """Llama whose sparse layers have a router, experts of gate, up and down, and shared experts."""
    model, dense = config.model, llama_sizes(config)
    experts, k, width = model.num_experts, model.num_experts_per_tok, model.moe_intermediate_size
    assert experts is not None
    assert k is not None
    assert width is not None
    layers = sum(is_sparse(model, layer) for layer in range(model.num_hidden_layers))
    further = sum(is_sparse(model, layer) for layer in all_layers(model)) - layers
    mlp, expert = 3 * model.hidden_size * model.intermediate_size, 3 * model.hidden_size * width
    always = experts * model.hidden_size + model.n_shared_experts * expert - mlp  # router and shared, not the block
    return Sizes(
        parameters=dense.parameters + layers * (always + experts * expert),
        matmul_parameters=dense.matmul_parameters + (layers + further) * (always + k * expert),
        attention_width=dense.attention_width,
        active_parameters=dense.parameters + layers * (always + k * expert),
        mtp_parameters=dense.mtp_parameters + further * (always + experts * expert),
    )


def rotary_dim(model: Model) -> int:
    """Features of a query or key head that positions turn: all, but for latent attention."""
    dim = model.qk_rope_head_dim or model.head_dim
    assert dim is not None
    return dim


def window_of(model: Model, layer: int) -> int | None:
    """Tokens that a query sees at most in a layer, its own included; None: all before it."""
    sliding = model.layer_types is None or model.layer_types[_like(model, layer)] == "sliding_attention"
    return model.sliding_window if sliding else None


def mean_keys(config: Config, layer: int) -> float:
    """Keys that a query of a layer sees on average, by the usual convention for a causal mask: half of the sequence.

    A window w of s tokens hides all but w from all but the first: w − w² / 2s. Document masks, which hang on the data,
    are not counted.
    """
    length = config.batch.sequence_length
    window = min(window_of(config.model, layer) or length, length)
    return window - window**2 / (2 * length)
