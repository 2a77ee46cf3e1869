"""Every key a config may have: type, unit, default, and when to change it.

The docstring under a field is its documentation: `ultrascale config schema` publishes it as JSON Schema, and
editors show it through the modeline at the head of the files in configs/.

The ranges here are those of the contract. What a package cannot do yet is refused by that package's
`check.py`, with what to use in its place, so that the schema does not change when the package learns it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _integral(value: object) -> object:
    """YAML 1.2 reads 1e6 as a float; it is a fine way to write a count. 2.5 stays a float, and is refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integral)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_integral)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(_integral)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Axis = Literal["pp", "dp", "ep", "cp", "tp"]
# Tuples, because a config is frozen; not strict, because YAML writes them as lists. Their items stay strict.
Axes = Annotated[tuple[Axis, ...], Field(strict=False)]
Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
LayerTypes = Annotated[tuple[Literal["full_attention", "sliding_attention"], ...], Field(strict=False)]
LayersPerStage = Annotated[tuple[NonNegative, ...], Field(strict=False)]


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Run(Section):
    """What the run is called, how long it goes on, and where it writes."""

    dir: str | None = None
    """Folder of the run: metrics, checkpoints, manifest. null = runs/<run.name>."""
    name: Annotated[str, Field(min_length=1)] = "run"
    """Name of the run, in the console and in reports."""
    seed: Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_integral)] = 0
    """Seed of initial values, data order and every other random draw. Change it for an independent run."""
    steps: Positive
    """Optimizer steps after which the run is finished. May be raised later: nothing else depends on it."""
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """auto: go on from the newest whole checkpoint of run.dir, if there is one. never: start anew, refusing
    a folder that holds a run. Anything else: the path of a checkpoint or of a run folder."""


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
    """Weight of the loss that keeps experts evenly busy within each sequence, summed over layers (0.001)."""
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


class Parallel(Section):
    """How the work is cut: the sizes of the mesh axes, and what is done over them."""

    dp: Positive | None = None
    """Data parallel replicas. null = what is left of the world: processes / (tp · cp · pp · ep)."""
    tp: Positive = 1
    """Tensor parallel: every matrix is cut over this many ranks. Keep it inside one host."""
    cp: Positive = 1
    """Context parallel: every sequence is cut over this many ranks. For long sequences."""
    pp: Positive = 1
    """Pipeline parallel: the layers are cut over this many ranks. For models that tp does not make fit."""
    ep: Positive = 1
    """Expert parallel: the experts are cut over this many ranks. Dense layers see more data parallelism."""
    order: Axes = ("pp", "dp", "ep", "cp", "tp")
    """All five axes, outermost first. Neighbouring ranks differ in the last, which gets the fastest links."""
    zero_stage: Annotated[int, Field(ge=0, le=3), BeforeValidator(_integral)] = 0
    """What replicas share out: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    dp_shard: Positive | None = None
    """Replicas over which zero_stage shares out; dp / dp_shard groups of them hold copies (HSDP): a host's worth, for
    slow links between hosts. null = all of dp."""
    prefetch: Annotated[int, Field(ge=0), BeforeValidator(_integral)] = 1
    """zero_stage 3: units whose parameters are gathered ahead of the one that is computed. Each costs its memory."""
    keep_gathered: bool = False
    """zero_stage 3: keep a stage's parameters from its first forward to its last backward of a step, for less traffic
    and the memory of stage 2."""
    overlap: bool = True
    """Let reductions and gathers run while something is computed. false only to measure what it is worth."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """Cut activations over tp outside the matrices too: the same traffic, less memory. auto = tp > 1."""
    expert_axes: Axes = ("ep",)
    """Axes that experts are cut over. [ep, cp] or [cp, tp] fold them onto axes that dense layers cut by."""
    expert_tensor_axes: Axes | None = None
    """Axes that the matrices inside one expert are cut over. null = [tp], or [] when experts fold onto tp."""
    bucket_bytes: Positive | Literal["auto"] = "auto"
    """zero_stage 0, 1: bytes of gradients that are reduced at a time. Larger where messages are slow to start, smaller
    for more overlap. auto = from latency and bandwidth of the links; manifest.json says the number. A unit (block,
    embedding, head) stays whole, and is what is reduced at a time from zero_stage 2 on."""
    deterministic_reduction: bool | Literal["auto"] = "auto"
    """Sum gradients in rank order, so that bucket sizes change no bit. auto = yes on CPU, no on CUDA."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e7)] = 600.0
    """Seconds after which a collective that hangs ends the run."""


class Pipeline(Section):
    """In which order stages work, and which layers they hold."""

    schedule: Annotated[str, Field(min_length=1)] = "1f1b"
    """Name of the schedule; `ultrascale schedule NAME` draws it."""
    virtual_stages: Positive | None = None
    """Stages on each rank. null = the schedule's own number."""
    group_size: Positive | None = None
    """Micro-batches that run one after another on a virtual stage before the next stage's turn, for interleaved
    schedules: more hide messages better and hold more activations. null = the schedule's own number."""
    activation_limit: Positive | None = None
    """Activations (stage × micro-batch) that each rank may hold at once, for automatic schedules. null = the
    schedule's own number."""
    costs: Annotated[str, Field(min_length=1)] | None = None
    """Times that automatic schedules order by, as `ultrascale schedule --cost` takes them, per stage:
    F=1:1:1.6,BI=…. null = by the FLOPs of each stage's layers and head."""
    layout: LayersPerStage | str | None = None
    """Layers on each stage, as [3, 5] or as "E t*3 | t*5 L" (E embedding, t block, L head); balanced = so that the
    slowest rank is fastest, by the FLOPs of layers and head. null = as even as it goes."""


class Context(Section):
    """How attention works on a sequence that is cut over cp."""

    method: Literal["ring", "allgather", "ulysses", "hybrid"] = "ring"
    """ring passes keys and values around, allgather gathers them, ulysses trades tokens for heads, hybrid is
    ulysses inside of ring."""
    split: Literal["zigzag", "contiguous"] = "zigzag"
    """How the ring's (or the all-gather's) ranks share out the tokens: zigzag gives every rank the same share of a
    causal mask, document by document; contiguous does not, but sends little under a sliding window."""
    ulysses_size: Positive | None = None
    """hybrid: ranks that trade tokens for heads; cp / ulysses_size of such groups form the ring. The ranks of a host,
    for slow links between hosts. null = as many as divide both cp and the query heads of a tp rank."""
    pad: bool = False
    """Lengthen sequences at their end, to what cp and tp can cut, by tokens that are no targets, instead of refusing
    a batch.sequence_length that does not divide."""


class Kernels(Section):
    """Which implementation computes what has several."""

    attention: Literal["auto", "reference", "sdpa", "flash_attn"] = "auto"
    """reference: plain products, any head size, all scores in memory; sdpa: PyTorch's flash kernels; flash_attn: the
    package of that name. auto = the best that can run; `ultrascale doctor` says which and why."""


class Batch(Section):
    """How many tokens a step is made of. The order of samples depends on global_size alone."""

    global_size: Positive
    """Sequences in one optimizer step, over all ranks."""
    micro_size: Positive
    """Sequences in one forward pass of one replica. Larger uses a GPU better, and more memory."""
    sequence_length: Positive
    """Tokens in a sequence."""


class Source(Section):
    """One part of a blend."""

    path: Annotated[str, Field(min_length=1)]
    """Prefix of a .bin/.idx pair, or builtin:stdlib, or builtin:uneven."""
    weight: Annotated[float, Field(gt=0)]
    """Share of the samples, relative to the other parts' weights."""


Corpus = Annotated[str, Field(min_length=1)] | Annotated[tuple[Source, ...], Field(min_length=1, strict=False)]


class Data(Section):
    """The text."""

    train: Corpus
    """Prefix of a .bin/.idx pair made by `ultrascale data prepare`, or a list of {path, weight}, or
    builtin:stdlib (the source of Python's standard library, tokenised on first use), or builtin:uneven
    (synthetic)."""
    validation: Corpus | None = None
    """The same, held out. Needed by evaluation.every > 0."""
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    """A tokenizer.json, or bytes (256 bytes and an end of document: a vocabulary of 257)."""
    document_mask: bool = False
    """Attention stays within a document, and no token is predicted from the document before it. Otherwise documents
    are one stream, in which attention crosses from each into the next."""
    reset_positions: bool = False
    """Positions restart at 0 with each document. Needs document_mask or packing."""
    packing: Literal["none", "best_fit"] = "none"
    """none: sequences are cut from the stream of documents, wherever that falls. best_fit: a sequence holds whole
    documents, chosen so that little of it is left over; the rest is padding without targets."""
    cut_documents: bool = False
    """Under packing, documents longer than batch.sequence_length are cut into pieces. Otherwise they are refused."""


class ParameterGroup(Section):
    """What is set otherwise for some of the parameters. A key that is left out is as in optimizer.*."""

    match: Annotated[str, Field(min_length=1)] | None = None
    """Which parameters, by a pattern over their logical names: "layers.*.attention.*" (* is any text, dots too)."""
    kind: Literal["matrix", "norm", "embedding", "head"] | None = None
    """Which parameters, by what they are: a hidden matrix (experts are stacks of them), a norm's or other vector, the
    embedding (and the head, where they are one), the head."""
    optimizer: Literal["adamw", "sgd", "muon"] | None = None
    """Which optimizer."""
    lr_scale: Annotated[float, Field(ge=0)] | None = None
    """Factor on the learning rate, beside that of the model's own layout. 0 = these stay as they are."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """As optimizer.weight_decay; a number here holds for norms too."""
    betas: Betas | None = None
    """As optimizer.betas."""
    eps: Annotated[float, Field(gt=0)] | None = None
    """As optimizer.eps."""
    momentum: Fraction | None = None
    """As optimizer.momentum."""


class Optimizer(Section):
    """How a gradient becomes a step."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """Which optimizer. muon is for hidden matrices; norms, embedding and head take adamw under it."""
    lr: Annotated[float, Field(ge=0)]
    """Highest learning rate, reached after warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """adamw, muon: decoupled decay, times the learning rate; sgd: weight_decay · weight is added to the gradient.
    Norms have none."""
    betas: Betas = (0.9, 0.95)
    """AdamW: decay of the two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Fraction | None = None
    """sgd, muon: decay of the velocity. null = 0.95 for muon, 0 for sgd, which is plain descent."""
    max_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients with a larger global norm are scaled down to it. null = no clipping."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Parameters with settings of their own, as [{match: "embed_tokens.*", lr_scale: 0.1}, {kind: norm, …}]: of the
    groups that match a parameter the first one holds. One that holds for no parameter is an error."""
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    """muon: format in which matrices travel and are orthogonalised; float64 under precision.compute=float64. bfloat16
    is a few times faster on GPUs, and what the method was published with."""
    state_dtype: Literal["float32", "bfloat16"] | None = None
    """Format in which moments are held; updates are computed in that of the masters, and moments rounded to nearest
    after it. bfloat16 halves their memory. null = that of the masters."""
    offload: bool = False
    """Hold moments in host memory, for models that do not fit otherwise: they are copied to the GPU and back one
    segment ahead of their update. On CPU they are there already."""


class Schedule(Section):
    """The learning rate as a function of the step and of these keys alone."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warm-up: constant; linear or cosine down to min_lr at total_steps; wsd = constant, then
    linear decay over the last decay_steps."""
    total_steps: Positive | None = None
    """Step at which the decay ends; afterwards the rate stays at min_lr. Needed by linear, cosine and wsd."""
    warmup_steps: NonNegative = 0
    """Steps over which the rate rises linearly from 0."""
    decay_steps: Positive | None = None
    """wsd: length of the final decay. null = a tenth of total_steps."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Rate at the end of the decay."""


class Precision(Section):
    """In which number format which part is computed."""

    compute: Literal["float64", "float32", "bfloat16", "float16", "fp8"] = "float32"
    """Format of matrices and activations. Masters, norms, loss and sums use the wider of it and float32."""
    recipe: str | None = None
    """fp8: how scales are chosen."""
    reduce: Literal["float64", "float32", "bfloat16"] | None = None
    """Format in which gradients are summed over ranks. null = the wider of float32 and compute."""


class Recompute(Section):
    """Memory for time."""

    mode: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward: none, those that cost little time, or whole blocks."""


class Evaluation(Section):
    """Loss on data.validation during training."""

    every: NonNegative = 0
    """Steps between evaluations; 0 = never."""
    batches: Positive = 4
    """Global batches in one evaluation."""


class Checkpoint(Section):
    """What is saved, and when."""

    every: NonNegative = 0
    """Steps between checkpoints, and one at the end; 0 = never."""
    keep: Positive | None = 2
    """How many of the newest are kept; null = all."""
    asynchronous: bool = False
    """Write while training goes on, from a copy of the state in host memory, as large as what a rank saves."""
    verify: Literal["full", "sampled", "off"] = "full"
    """How much of a checkpoint is compared with its checksums when it is read."""
    allow_changes: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Keys that say what a run is, and that may be others than in the checkpoint it goes on from, as
    [batch.sequence_length, model.rope_scaling]. data.train stands for the content of the data."""


class Init(Section):
    """Where the first weights come from, when not from run.seed."""

    from_hf: str | None = None
    """A Hugging Face model folder (config.json and safetensors files) that the first weights are read from, under any
    layout; `ultrascale convert config FOLDER` prints the model section that fits. null = drawn from run.seed."""


class Observe(Section):
    """What is printed and watched."""

    console_every: Positive = 1
    """Steps between lines on the console. metrics.jsonl has them all."""
    replica_check_every: NonNegative = 100
    """Steps between checks that copies of a parameter are still bitwise equal; 0 = never."""


class Profile(Section):
    """What is recorded for later study."""

    timeline: bool = False
    """Write timeline-RANK.jsonl, with begin and end of every action."""


class Config(Section):
    """A run. Without a default are run.steps, the model's sizes, batch, data.train and optimizer.lr."""

    run: Run
    model: Model
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    context: Context = Context()
    kernels: Kernels = Kernels()
    batch: Batch
    data: Data
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    init: Init = Init()
    observe: Observe = Observe()
    profile: Profile = Profile()


def flatten(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Dotted key → value, in the schema's order. A list (data.train) and model.options count as one value."""
    values: dict[str, Any] = {}
    for name in type(section).model_fields:
        value, key = getattr(section, name), prefix + name
        values |= flatten(value, f"{key}.") if isinstance(value, BaseModel) else {key: value}
    return values


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, for editors and for error messages.

    No section requires a key here, for a file may get it from the one it `extends`; the loader does.
    """
    schema = Config.model_json_schema()
    sections = [schema["$defs"][name.capitalize()] for name in Config.model_fields]
    for definition in (schema, *sections):
        definition.pop("required", None)
    extends = {
        "type": "string",
        "description": "Another config file, relative to this one; what this file says comes on top of it.",
    }
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
