"""Parameter counts and FLOPs in closed form, from the config alone (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.config.schema import Config, Model


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
