"""Every key a config may have: type, unit, default, and when to change it.

The docstring under a field is its documentation: `ultrascale config schema` publishes it as JSON Schema, and
editors show it through the modeline at the head of the files in configs/.

The ranges here are those of the contract. What a package cannot do yet is refused by that package's
`check.py`, with what to use in its place, so that the schema does not change when the package learns it.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from ultrascale.config.model_section import Model
from ultrascale.config.section import Fraction, NonNegative, Positive, Section, integral

Axis = Literal["pp", "dp", "ep", "cp", "tp"]
# Tuples, because a config is frozen; not strict, because YAML writes them as lists. Their items stay strict.
Axes = Annotated[tuple[Axis, ...], Field(strict=False)]
Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
LayersPerStage = Annotated[tuple[NonNegative, ...], Field(strict=False)]


class Run(Section):
    """What the run is called, how long it goes on, and where it writes."""

    dir: str | None = None
    """Folder of the run: metrics, checkpoints, manifest. null = runs/<run.name>."""
    name: Annotated[str, Field(min_length=1)] = "run"
    """Name of the run, in the console and in reports."""
    seed: Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(integral)] = 0
    """Seed of initial values, data order and every other random draw. Change it for an independent run."""
    steps: Positive
    """Optimizer steps after which the run is finished. May be raised later: nothing else depends on it."""
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """auto: go on from the newest whole checkpoint of run.dir, if there is one. never: start anew, refusing
    a folder that holds a run. Anything else: the path of a checkpoint or of a run folder."""


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
    zero_stage: Annotated[int, Field(ge=0, le=3), BeforeValidator(integral)] = 0
    """What replicas share out: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    dp_shard: Positive | None = None
    """Replicas over which zero_stage shares out; dp / dp_shard groups of them hold copies (HSDP): a host's worth, for
    slow links between hosts. null = all of dp."""
    prefetch: Annotated[int, Field(ge=0), BeforeValidator(integral)] = 1
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
    expert_dispatch: Literal["auto", "all_to_all", "all_gather", "deep_ep"] = "auto"
    """How tokens reach their experts: all_to_all sends what is chosen; all_gather sends all tokens to all ranks that
    experts are cut over, for fewer ranks than a token has experts; deep_ep: the package of that name, on GPUs. auto =
    deep_ep where it can run, else all_to_all."""
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
    combine: Literal["wide", "compute"] = "wide"
    """Format in which outputs of a token's experts are weighted and added, and in which sums travel under
    parallel.expert_dispatch=all_gather: wide = the wider of float32 and compute; compute saves half of that traffic."""


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
    """What is saved, when, and where."""

    every: NonNegative = 0
    """Steps between checkpoints, and one at the end; 0 = never, or as every_minutes says."""
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes after which another is saved, by the clock of rank 0, when a step ends; and one at the end of the run.
    null = by steps only. With both, whichever comes first."""
    keep: Positive | None = 2
    """How many of the newest are kept; null = all."""
    keep_every: Positive | None = None
    """Those of steps that are a multiple of this are kept for good; null = none."""
    storage: Annotated[str, Field(min_length=1)] | None = None
    """A URL for fsspec, such as s3://bucket/run: whole checkpoints are copied there in the background, and a run goes
    on from there when those are newer than its own. Another one for each run. null = in the run folder only."""
    asynchronous: bool = True
    """Write while training goes on, from a copy of the state in host memory, as large as what a rank saves; false:
    train on when it is written."""
    verify: Literal["full", "sampled", "off"] = "full"
    """How much of a checkpoint is compared with its checksums when it is read."""
    export_hf: Annotated[str, Field(min_length=1)] | None = None
    """A folder in run.dir, as hugging_face: at the end of the run its last checkpoint is written there as a Hugging
    Face model, under step-00000010. null = none; `ultrascale convert to-hf` does it later."""
    allow_changes: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Keys that say what a run is, and that may be others than in the checkpoint it goes on from (or begins with), as
    [batch.sequence_length, model.rope_scaling]. data.train stands for the content of the data."""


class WeightRule(Section):
    """What some tensors begin with, where not with those of their name and shape."""

    match: Annotated[str, Field(min_length=1)]
    """Names of tensors of the run (with ignore: of the source), as `ultrascale checkpoint inspect` shows them: * stands
    for anything, and 8-15 between dots for each of these numbers."""
    action: Literal["fresh", "copy", "rows", "ignore"]
    """fresh: drawn from run.seed. copy: those that source names. rows: the rows that both have, those behind them drawn
    (another vocabulary). ignore: tensors of the source that the run has no place for are left out."""
    source: Annotated[str, Field(min_length=1)] | None = None
    """copy, rows: names there, with as many * and ranges as long: layers.0-7.* for layers.8-15.*. null = the same."""


class Init(Section):
    """Where the first weights come from, when not from run.seed. Step, learning rate, data and moments begin anew."""

    from_hf: Annotated[str, Field(min_length=1)] | None = None
    """A Hugging Face model folder (config.json and safetensors files) that the first weights are read from, under any
    layout; `ultrascale convert config FOLDER` prints the model section that fits. null = drawn from run.seed."""
    from_checkpoint: Annotated[str, Field(min_length=1)] | None = None
    """A checkpoint, or a run folder (its newest whole one), of which only the weights are read. null = none."""
    rules: Annotated[tuple[WeightRule, ...], Field(strict=False)] = ()
    """What may differ between the model and the source, as [{match: lm_head.weight, action: fresh}]. The first that
    matches a tensor decides; what none covers must be there, fit, and have a use."""


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
