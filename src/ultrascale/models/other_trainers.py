"""How other trainers' checkpoints hold our parameters: names, and what is fused with what, as data. Needs no torch.

The trainers of the tree are in `TRAINERS`; another is another entry. Which parameters a model has, and their shapes, is
what its mapping to Hugging Face says (`hugging_face_families.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from ultrascale.config.model_section import Model
from ultrascale.models.hugging_face import Dims, FamilyMapping, HuggingFaceError, Logical, logical_parameters
from ultrascale.models.row_order import RowOrder

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Source:
    """A box of one of our parameters, and where it lies in a tensor of theirs.

    form     shape of the tensor there
    corner   index there of the box's first element; dims are aligned from the last one on, and those before have size 1
    padded   whether the first dim there may be longer, which is padding
    """

    theirs: str
    form: Dims
    corner: Dims
    offset: Dims
    shape: Dims
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """One of our parameters, the sources that tile it, and the order of its rows there, where it is another."""

    shape: Dims
    sources: tuple[Source, ...]
    rows: RowOrder | None = None


@dataclass(frozen=True, slots=True)
class At:
    """A tensor of theirs that one of our parameters is in.

    theirs   its name; with `{expert}` one for each expert, otherwise experts are its first dim
    part     which part of it: "" all; queries, keys, values: of each group of heads [queries, key, value]; gate, up:
             the first and the second half of the rows; vocabulary: the rows before the padding
    """

    theirs: str
    part: str = ""


@dataclass(frozen=True)
class Trainer:
    """A trainer's names.

    mark      the name of the embedding: by it, and by nothing else that a checkpoint has, a trainer is known
    names     ours → where it may be; the first that is there counts. `{layer}` stands for the layer's number
    paired    families whose queries and keys are turned in neighbouring pairs of features
    families  those that it trains under these names
    stacked   whether all layers may lie in one tensor: the layer is its first dim then, and not in its name
    state     the name of an optimizer's state: `{state}` of `{name}`
    masters   the state that is a parameter in full precision
    advice    what exports to Hugging Face there
    """

    title: str
    mark: str
    names: Mapping[str, tuple[At, ...]]
    families: tuple[str, ...]
    state: str
    paired: tuple[str, ...] = ()
    stacked: bool = False
    masters: str | None = None
    advice: str = ""


def _layers(prefix: str, names: Mapping[str, tuple[At, ...]]) -> dict[str, tuple[At, ...]]:
    """With the prefix of a layer on both sides."""
    return {
        f"layers.{{layer}}.{ours}.weight": tuple(At(f"{prefix}{at.theirs}", at.part) for at in places)
        for ours, places in names.items()
    }


def _at(*theirs: str, part: str = "") -> tuple[At, ...]:
    return tuple(At(name, part) for name in theirs)


def _qkv(separate: Collection[str], fused: str, part: str) -> tuple[At, ...]:
    return (*_at(*separate), At(fused, part))


ROUTER_BIAS = "layers.{layer}.moe.router.bias"
"""No parameter: it is moved after each step, and no optimizer has a state of it."""

_TITAN_FUSED = "attention.qkv_linear.wqkv.weight"

TORCHTITAN = Trainer(
    title="TorchTitan",
    mark="tok_embeddings.weight",
    families=("llama", "qwen3", "qwen3_moe"),
    paired=("llama",),
    state="optimizer.state.{name}.{state}",
    names={
        "embed_tokens.weight": _at("tok_embeddings.weight"),
        "norm.weight": _at("norm.weight"),
        "lm_head.weight": _at("output.weight", "lm_head.weight"),
        **_layers(
            "layers.{layer}.",
            {
                "attention_norm": _at("attention_norm.weight"),
                "attention.q_proj": _qkv(
                    ("attention.wq.weight", "attention.qkv_linear.wq.weight"), _TITAN_FUSED, "queries"
                ),
                "attention.k_proj": _qkv(
                    ("attention.wk.weight", "attention.qkv_linear.wk.weight"), _TITAN_FUSED, "keys"
                ),
                "attention.v_proj": _qkv(
                    ("attention.wv.weight", "attention.qkv_linear.wv.weight"), _TITAN_FUSED, "values"
                ),
                "attention.o_proj": _at("attention.wo.weight"),
                "attention.q_norm": _at("attention.q_norm.weight"),
                "attention.k_norm": _at("attention.k_norm.weight"),
                "mlp_norm": _at("ffn_norm.weight"),
                "mlp.gate_proj": _at("feed_forward.w1.weight"),
                "mlp.up_proj": _at("feed_forward.w3.weight"),
                "mlp.down_proj": _at("feed_forward.w2.weight"),
                "moe.router": _at("moe.router.gate.weight"),
                "moe.experts.gate_proj": _at("moe.experts.w1"),
                "moe.experts.up_proj": _at("moe.experts.w3"),
                "moe.experts.down_proj": _at("moe.experts.w2"),
            },
        ),
        ROUTER_BIAS: _at("layers.{layer}.moe.expert_bias"),
    },
    advice="scripts/checkpoint_conversion/convert_to_hf.py of TorchTitan",
)

_EXPERTS = ("mlp.experts.experts", "mlp.experts.experts.{expert}", "mlp.experts.local_experts.{expert}")

MEGATRON = Trainer(
    title="Megatron-Core",
    mark="embedding.word_embeddings.weight",
    families=("llama", "qwen3", "mixtral", "qwen3_moe"),
    state="optimizer.state.{state}.{name}",
    masters="fp32_param",
    stacked=True,
    names={
        "embed_tokens.weight": _at("embedding.word_embeddings.weight", part="vocabulary"),
        "norm.weight": _at("decoder.final_layernorm.weight"),
        "lm_head.weight": _at("output_layer.weight", part="vocabulary"),
        **_layers(
            "decoder.layers.{layer}.",
            {
                # Norms lie in the matrix behind them where Transformer Engine fuses the two.
                "attention_norm": _at("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
                "attention.q_proj": _at("self_attention.linear_qkv.weight", part="queries"),
                "attention.k_proj": _at("self_attention.linear_qkv.weight", part="keys"),
                "attention.v_proj": _at("self_attention.linear_qkv.weight", part="values"),
                "attention.o_proj": _at("self_attention.linear_proj.weight"),
                "attention.q_norm": _at("self_attention.q_layernorm.weight"),
                "attention.k_norm": _at("self_attention.k_layernorm.weight"),
                "mlp_norm": _at("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
                "mlp.gate_proj": (*_at("mlp.linear_fc1.weight", part="gate"), *_at("mlp.linear_fc1.weight_w")),
                "mlp.up_proj": (*_at("mlp.linear_fc1.weight", part="up"), *_at("mlp.linear_fc1.weight_v")),
                "mlp.down_proj": _at("mlp.linear_fc2.weight"),
                "moe.router": _at("mlp.router.weight"),
                "moe.experts.gate_proj": (
                    *_at(*(f"{experts}.linear_fc1.weight" for experts in _EXPERTS), part="gate"),
                    *_at(*(f"{experts}.linear_fc1.weight_w" for experts in _EXPERTS)),
                ),
                "moe.experts.up_proj": (
                    *_at(*(f"{experts}.linear_fc1.weight" for experts in _EXPERTS), part="up"),
                    *_at(*(f"{experts}.linear_fc1.weight_v" for experts in _EXPERTS)),
                ),
                "moe.experts.down_proj": _at(*(f"{experts}.linear_fc2.weight" for experts in _EXPERTS)),
            },
        ),
        ROUTER_BIAS: _at("decoder.layers.{layer}.mlp.router.expert_bias"),
    },
    advice="Megatron-Bridge, which exports to Hugging Face folders",
)

TRAINERS = (TORCHTITAN, MEGATRON)

NOT_WEIGHTS = re.compile(
    r"((chained_\d+\.)?optimizer\.|(train_state|lr_scheduler|dataloader|rng_state|opt_param_scheduler"
    r"|rerun_state_machine_state|iteration|args|checkpoint_version)([./]|$))"
    r"|(^|\.)(freqs_cis|inv_freq)$|\._extra_state"
)
"""What checkpoints hold beside weights: `match` of a name's beginning, `search` of its end."""


@dataclass(frozen=True)
class Naming:
    """The names of one checkpoint.

    trainer  None: those of Hugging Face
    prefix   before all names of parameters: the name that the model has in its trainer
    """

    trainer: Trainer | None
    prefix: str
    mapping: FamilyMapping
    model: Model
    held: Mapping[str, Held]

    @property
    def trained(self) -> dict[str, Held]:
        """Those that an optimizer has states of."""
        return {name: one for name, one in self.held.items() if _stem(name) != ROUTER_BIAS}

    @property
    def title(self) -> str:
        return self.trainer.title if self.trainer else "Hugging Face"


def naming(names: Collection[str], mapping: FamilyMapping, model: Model, paired: bool | None) -> Naming:
    """Whose names these are, and where they hold the parameters of a resolved model.

    paired   whether neighbouring features of queries and keys are turned together; None: as the trainer does it

    Raises HuggingFaceError when no trainer is known by them, or it has no names for such a model.
    """
    theirs = logical_parameters(mapping, model, names)
    trainer, prefix = _known_by(names, theirs["embed_tokens.weight"].parts[0].theirs)
    there = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    if trainer is None:
        if paired is not None:
            raise HuggingFaceError("names are Hugging Face's, and rows lie as they do there; leave --rope out")
        theirs = logical_parameters(mapping, model, there)
        return Naming(None, prefix, mapping, model, {name: _from_parts(one) for name, one in theirs.items()})
    if model.family not in trainer.families:
        raise HuggingFaceError(
            f"{trainer.title}'s names for model.family={model.family} are not known here; those of "
            f"{', '.join(trainer.families)} are: export to a Hugging Face folder there, with {trainer.advice}, and run "
            "`ultrascale convert from-hf`"
        )
    turned = model.family in trainer.paired if paired is None else paired
    held = {name: _held(trainer, name, one.shape, model, there, turned) for name, one in theirs.items()}
    return Naming(trainer, prefix, mapping, model, held)


def _known_by(names: Collection[str], hugging_face: str) -> tuple[Trainer | None, str]:
    """The trainer of which the embedding's name is there, and what stands before it; None: Hugging Face's name is."""
    marks: dict[str, Trainer | None] = {**{trainer.mark: trainer for trainer in TRAINERS}, hugging_face: None}
    for mark, trainer in marks.items():
        found = [n for n in names if (n == mark or n.endswith(f".{mark}")) and not NOT_WEIGHTS.match(n)]
        if len(found) == 1:
            return trainer, found[0].removesuffix(mark)
    said = ", ".join(f"{mark} ({trainer.title if trainer else 'Hugging Face'})" for mark, trainer in marks.items())
    raise HuggingFaceError(f"none of the names by which a trainer is known is there once: {said}")


def copies(of: Naming) -> dict[str, str]:
    """Their name → ours, of heads that may be there beside the embedding that they are tied to."""
    if not of.model.tie_word_embeddings:
        return {}
    if of.trainer is None:
        return {p.theirs: p.tied_to for p in of.mapping.parameters if p.tied_to}
    return {at.theirs: "embed_tokens.weight" for at in of.trainer.names["lm_head.weight"]}


def _stem(name: str) -> str:
    return _LAYER.sub("layers.{layer}.", name, count=1)


def _from_parts(logical: Logical) -> Held:
    """Hugging Face's parts; one that does not begin its tensor begins with a row of it."""
    sources = []
    for part in logical.parts:
        corner = tuple(part.start // prod(part.form[d + 1 :]) % part.form[d] for d in range(len(part.form)))
        sources.append(Source(part.theirs, part.form, corner, part.offset, part.shape))
    return Held(logical.shape, tuple(sources), logical.rows)


def _held(trainer: Trainer, name: str, shape: Dims, model: Model, there: Collection[str], paired: bool) -> Held:
    layer = _LAYER.match(name)
    number = int(layer[1]) if layer else 0
    stem = _stem(name)
    if stem not in trainer.names:
        raise HuggingFaceError(f"{name} has no place in {trainer.title}'s names")
    ways = [(at, False) for at in trainer.names[stem]]
    if trainer.stacked and layer:
        ways += [(At(at.theirs.replace("{layer}.", ""), at.part), True) for at in trainer.names[stem]]
    filled = [(At(at.theirs.replace("{layer}", str(number)), at.part), stacked) for at, stacked in ways]
    at, stacked = next(((a, s) for a, s in filled if a.theirs.replace("{expert}", "0") in there), filled[0])
    sources = tuple(_sources(at, shape, model, (number, model.num_hidden_layers) if stacked else None))
    turned = paired and stem.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"))
    assert model.head_dim is not None
    return Held(shape, sources, RowOrder(model.head_dim, 0, pairs=True) if turned else None)


def _sources(at: At, shape: Dims, model: Model, stacked: tuple[int, int] | None) -> Iterator[Source]:
    """`stacked`: number of the layer, and how many there are, where all lie in one tensor."""
    vector = len(shape) == 1
    lead, tail = shape[:-2], () if vector else shape[-1:]
    rows, runs = _runs(at.part, shape[0] if vector else shape[-2], model)
    start = (0,) * len(tail)
    for expert in product(*map(range, lead)):
        for ours, count, row in runs:
            form, corner = (*lead, rows, *tail), (*expert, row, *start)
            if "{expert}" in at.theirs:
                form, corner = form[1:], corner[1:]
            if stacked:
                form, corner = (stacked[1], *form), (stacked[0], *corner)
            theirs = at.theirs.replace("{expert}", str(*expert))
            offset, size = (*expert, ours, *start), (*(1 for _ in lead), count, *tail)
            yield Source(theirs, form, corner, offset, size, at.part == "vocabulary")


def _runs(part: str, rows: int, model: Model) -> tuple[int, list[tuple[int, int, int]]]:
    """How many rows there are in the tensor that a part is of, and the part's runs in it: (row of ours, how many, row
    there)."""
    if part in ("queries", "keys", "values"):
        assert model.head_dim is not None
        assert model.num_key_value_heads is not None
        groups, size = model.num_key_value_heads, model.head_dim
        queries = model.num_attention_heads // groups
        heads, first = {"queries": (queries, 0), "keys": (1, queries), "values": (1, queries + 1)}[part]
        group = (queries + 2) * size
        runs = [(g * heads * size, heads * size, g * group + first * size) for g in range(groups)]
        return groups * group, runs
    if part in ("gate", "up"):
        return 2 * rows, [(0, rows, rows if part == "up" else 0)]
    return rows, [(0, rows, 0)]
