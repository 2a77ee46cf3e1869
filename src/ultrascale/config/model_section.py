"""The section `model` of a config."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ultrascale.config.section import Fraction, NonNegative, Positive, Section

LayerTypes = Annotated[tuple[Literal["full_attention", "sliding_attention"], ...], Field(strict=False)]


class LinearScaling(Section):
    """Position interpolation: all rotary frequencies slowed alike."""

    rope_type: Literal["linear"]
    """linear: all frequencies are divided by factor, as if positions lay closer (Chen et al. 2023). Needs training at
    the new length."""
    factor: Annotated[float, Field(ge=1)]
    """By how much: the new context over the one trained on."""


class YarnScaling(Section):
    """YaRN: slow rotary frequencies are divided, fast ones kept, and attention is sharpened."""

    rope_type: Literal["yarn"]
    """yarn: frequencies that turn often within the original context are kept, those that hardly turn are divided by
    factor (Peng et al. 2023). The least training for the most length."""
    factor: Annotated[float, Field(ge=1)]
    """By how much: the new context over the one trained on."""
    original_max_position_embeddings: Positive
    """Context, in tokens, that the unscaled frequencies were trained on."""
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    """Frequencies with more turns than this in the original context are kept."""
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    """Frequencies with fewer turns than this in the original context are divided by the whole factor."""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """Multiplies cos and sin, and so the attention's logits by its square. null = 0.1 · ln(factor) + 1, or what mscale
    and mscale_all_dim say."""
    mscale: Annotated[float, Field(gt=0)] | None = None
    """With mscale_all_dim, as in DeepSeek's models: attention_factor = (0.1 · mscale · ln(factor) + 1) / (0.1 ·
    mscale_all_dim · ln(factor) + 1)."""
    mscale_all_dim: Annotated[float, Field(gt=0)] | None = None
    """See mscale. The two go together."""
    truncate: bool = True
    """Round the bounds between kept, blended and divided frequencies outwards to whole ones."""


class Llama3Scaling(Section):
    """Llama 3's stretching of rotary frequencies for contexts longer than those first trained on."""

    rope_type: Literal["llama3"]
    """llama3: long wavelengths are stretched by factor, short ones kept (Llama 3.1)."""
    factor: Annotated[float, Field(ge=1)]
    """By how much the low frequencies are slowed (8 in Llama 3.1)."""
    low_freq_factor: Annotated[float, Field(gt=0)]
    """Wavelengths above original_max_position_embeddings / this get the whole factor (1 in Llama 3.1)."""
    high_freq_factor: Annotated[float, Field(gt=0)]
    """Wavelengths below original_max_position_embeddings / this stay as they are (4 in Llama 3.1)."""
    original_max_position_embeddings: Positive
    """Context, in tokens, that the unscaled frequencies were trained on (8192 in Llama 3)."""


_BY_LENGTH = "its frequencies change with the length of the sequence at hand, and a model that trains has one set"
RopeScaling = Annotated[
    LinearScaling | YarnScaling | Llama3Scaling,
    Field(
        discriminator="rope_type",
        json_schema_extra={
            "refused": {
                "default": "it scales nothing; write rope_scaling: null",
                "dynamic": f"{_BY_LENGTH}; use yarn",
                "longrope": f"{_BY_LENGTH}; use yarn",
            }
        },
    ),
]
"""What a section says of rope_type decides which keys it has. `refused`: Hugging Face's other kinds, and why not."""


class Model(Section):
    """The network, by the names that Hugging Face gives its fields."""

    family: Annotated[str, Field(min_length=1)]
    """llama, qwen3, deepseek_v3, or package.module:Family for a model outside the tree."""
    hidden_size: Positive
    """Width of the residual stream."""
    num_hidden_layers: Positive
    """Number of transformer blocks."""
    num_attention_heads: Positive
    """Number of query heads. parallel.tp must divide it."""
    num_key_value_heads: Positive | None = None
    """Number of key and value heads (grouped-query attention). null = num_attention_heads."""
    head_dim: Positive | None = None
    """Width of one head of queries and keys. null = hidden_size / num_attention_heads; with latent attention
    qk_nope_head_dim + qk_rope_head_dim."""
    q_lora_rank: Positive | None = None
    """deepseek_v3: width of the latent that queries are made from (1536 in DeepSeek-V3). null = queries come straight
    from the residual stream, as in DeepSeek-V2-Lite."""
    kv_lora_rank: Positive | None = None
    """deepseek_v3: width of the latent that keys and values are made from (512 in DeepSeek-V3)."""
    qk_nope_head_dim: Positive | None = None
    """deepseek_v3: features of a query or key head that positions leave alone (128 in DeepSeek-V3)."""
    qk_rope_head_dim: Positive | None = None
    """deepseek_v3: features of a query or key head that positions turn; all heads share these of the key (64 in
    DeepSeek-V3)."""
    v_head_dim: Positive | None = None
    """deepseek_v3: width of a value head (128 in DeepSeek-V3)."""
    intermediate_size: Positive
    """Width inside the feed-forward block. parallel.tp must divide it."""
    num_experts: Positive | None = None
    """qwen3_moe, mixtral: feed-forward blocks (experts) of a sparse layer, of which a token meets a few."""
    num_experts_per_tok: Positive | None = None
    """Experts that a token is sent to."""
    moe_intermediate_size: Positive | None = None
    """Width inside an expert. The axes of parallel.expert_tensor_axes must divide it."""
    n_shared_experts: NonNegative = 0
    """Experts that every token meets besides, as one block of so many times the width."""
    norm_topk_prob: bool = True
    """Make the weights of a token's experts add up to 1."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """How a router's logits become scores: over all experts together (Mixtral, Qwen3), or each alone (DeepSeek-V3)."""
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 1.0
    """What the weights of a token's experts are multiplied with (2.5 in DeepSeek-V3)."""
    n_group: Positive = 1
    """Groups of experts, of which a token chooses topk_group before it chooses experts."""
    topk_group: Positive = 1
    """Groups that a token may choose experts from."""
    decoder_sparse_step: Positive = 1
    """Every so many layers one is sparse."""
    mlp_only_layers: Annotated[tuple[NonNegative, ...], Field(strict=False)] = ()
    """Layers, from 0, that are dense all the same."""
    first_k_dense_replace: NonNegative = 0
    """The first so many layers are dense."""
    router_bias_update_rate: Annotated[float, Field(ge=0)] | None = None
    """Balance routers without a loss: by how much an expert's bias, which counts for the choice alone, moves after each
    step towards an even load (0.001 in DeepSeek-V3, 0 at its end). null = no biases."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the loss that keeps experts evenly busy, summed over layers (0.001)."""
    router_aux_loss_scope: Literal["sequence", "global_batch"] = "sequence"
    """Where that loss wants an even load: within each sequence, or over the global batch, by the shares of the tokens
    that experts got in the step before."""
    router_jitter_noise: Fraction = 0.0
    """In training, what a router sees is multiplied with random factors within 1 ± this, by feature (0.01 in Switch
    Transformers). 0 = none."""
    expert_capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """In training, an expert takes at most this times its even share of the tokens of each sequence, the first that
    chose it, rounded up; the others do without it. null = nothing is dropped."""
    router_z_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of logsumexp(router logits)², a mean over tokens, summed over layers (0.001)."""
    vocab_size: Positive
    """Number of token ids. Any number will do: it is padded inside, out of sight of loss and checkpoint."""
    tie_word_embeddings: bool = False
    """Use the embedding's weight as the head's too. Usual for small models."""
    max_position_embeddings: Positive = 2048
    """Longest sequence, in tokens, that the model is made for."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary frequencies. Larger for longer contexts (500000 in Llama 3)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary frequencies; null = none."""
    sliding_window: Positive | None = None
    """Tokens that a query sees at most, its own included. null = all before it."""
    layer_types: LayerTypes | None = None
    """Which layers the sliding window holds for, one entry each. null = all."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square inside RMSNorm."""
    initializer_range: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights."""
    depth_scaled_init: bool = False
    """Divide the initial deviation of what writes to the residual stream by sqrt(2 · layers)."""
    num_nextn_predict_layers: NonNegative = 0
    """Multi-token prediction: layers behind the last, each of which predicts one token further ahead (1 in
    DeepSeek-V3). They lie on the last pipeline stage, and use embedding and head of the model."""
    mtp_loss_coefficient: Annotated[float, Field(ge=0)] = 0.3
    """Weight of the mean of their losses (DeepSeek-V3: 0.3 for 10 T tokens, then 0.1)."""
    label_smoothing: Fraction = 0.0
    """Share of the target probability that is spread over the whole vocabulary."""
    z_loss_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of logsumexp(logits)² in the loss: keeps logits small in long bfloat16 runs (1e-4 in PaLM)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a family outside the tree, handed to it as they are."""
