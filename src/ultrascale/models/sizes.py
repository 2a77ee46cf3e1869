"""Parameter counts and FLOPs in closed form, from the config alone (no torch)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ultrascale.config.schema import Config, Model


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder-only model."""

    parameters: int
    """Logical parameters, ties counted once."""
    matmul_parameters: int
    """Those that a token is multiplied with: no embedding, no norms; the head counts, tied or not."""
    attention_width: int
    """Σ over layers of heads · (query and key head size + value head size): 2 · width FLOPs per (query, key) pair."""
    active_parameters: int
    """Those that one token meets: of the experts only the chosen and the shared ones."""

    def plus_norms(self, parameters: int) -> Sizes:
        """With further vectors that every token meets."""
        return replace(
            self,
            parameters=self.parameters + parameters,
            active_parameters=self.active_parameters + parameters,
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
    layers = model.num_hidden_layers
    vocabulary = model.vocab_size * hidden
    parameters = (
        vocabulary * (1 if model.tie_word_embeddings else 2)
        + layers * (attention.matrices + attention.norms + mlp + 2 * hidden)
        + hidden
    )
    return Sizes(
        parameters=parameters,
        matmul_parameters=layers * (attention.matrices + mlp) + vocabulary,
        attention_width=layers * attention.width,
        active_parameters=parameters,
    )


def is_sparse(model: Model, layer: int) -> bool:
    """Whether a layer has experts in place of one feed-forward block."""
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
    mlp, expert = 3 * model.hidden_size * model.intermediate_size, 3 * model.hidden_size * width
    always = experts * model.hidden_size + model.n_shared_experts * expert - mlp  # router and shared, not the block
    return Sizes(
        parameters=dense.parameters + layers * (always + experts * expert),
        matmul_parameters=dense.matmul_parameters + layers * (always + k * expert),
        attention_width=dense.attention_width,
        active_parameters=dense.parameters + layers * (always + k * expert),
    )


def rotary_dim(model: Model) -> int:
    """Features of a query or key head that positions turn: all, but for latent attention."""
    dim = model.qk_rope_head_dim or model.head_dim
    assert dim is not None
    return dim


def window_of(model: Model, layer: int) -> int | None:
    """Tokens that a query sees at most in a layer, its own included; None: all before it."""
    sliding = model.layer_types is None or model.layer_types[layer] == "sliding_attention"
    return model.sliding_window if sliding else None


def mean_keys(config: Config, layer: int) -> float:
    """Keys that a query of a layer sees on average, by the usual convention for a causal mask: half of the sequence.

    A window w of s tokens hides all but w from all but the first: w − w² / 2s. Document masks, which hang on the data,
    are not counted.
    """
    length = config.batch.sequence_length
    window = min(window_of(config.model, layer) or length, length)
    return window - window**2 / (2 * length)
