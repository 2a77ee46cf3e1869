"""Parameter counts and FLOPs in closed form, from the config alone (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.config.schema import Config


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder-only model."""

    parameters: int
    """Logical parameters, ties counted once."""
    matmul_parameters: int
    """Those that a token is multiplied with: no embedding, no norms; the head counts, tied or not."""
    attention_width: int
    """Σ over layers of heads · head_dim: attention scores cost 2 · width FLOPs per (query, key) pair, twice."""


def llama_sizes(config: Config) -> Sizes:
    """Llama: per layer q, k, v, o, gate, up, down and two norms; embedding, final norm, head unless tied."""
    model = config.model
    heads, kv_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    assert kv_heads is not None
    assert head_dim is not None
    hidden = model.hidden_size
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    mlp = 3 * hidden * model.intermediate_size
    layers = model.num_hidden_layers
    vocabulary = model.vocab_size * hidden
    return Sizes(
        parameters=vocabulary * (1 if model.tie_word_embeddings else 2)
        + layers * (attention + mlp + 2 * hidden)
        + hidden,
        matmul_parameters=layers * (attention + mlp) + vocabulary,
        attention_width=layers * heads * head_dim,
    )
