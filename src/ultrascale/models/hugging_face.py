"""How a family stands in a Hugging Face folder: its parameters' names there, and its fields of config.json, as data.

The data of the families of the tree are in `hugging_face_families.py`; here is what is done with the names, the same
for all; what is done with the fields is in `hugging_face_config.py`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ultrascale.config.model_section import Model
from ultrascale.models.row_order import RowOrder
from ultrascale.models.sizes import all_layers, is_sparse, layer_name

Dims = tuple[int, ...]


class HuggingFaceError(Exception):
    """A Hugging Face folder, or a model, that does not fit the other side; the text names all that is wrong."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where transformers holds a parameter, if not as folders do: so it lies in those that were saved as held.

    number, of   the tensor has `of` matrices of each expert, one below the other; this is which of them
    """

    theirs: str
    number: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical parameter, or one of each layer.

    name     ours; `layers.{layer}` stands for what our names of the layer begin with
    theirs   Hugging Face's; with `{expert}` a tensor for each place along our first dim
    shape    sizes by their names in `sizes`; a model in which one of them is 0 has no such parameter
    tied_to  ours that it is the same as under model.tie_word_embeddings: then it is not stored twice
    sparse   whether layers with experts have it, or those without; None: all
    loaded   a second place where it may lie
    turned   sizes of a head's rows and of those of them that positions leave alone, where the two sides may pair the
             others differently
    wide     whether it is written in float32 at least, whatever the dtype of the others
    behind   whether only layers that predict further tokens have it: their numbers go on where the decoder's end
    """

    name: str
    theirs: str
    shape: tuple[str, ...]
    tied_to: str | None = None
    sparse: bool | None = None
    loaded: Loaded | None = None
    turned: tuple[str, str] | None = None
    wide: bool = False
    behind: bool = False

    def of_layer(self, number: int, ours: str) -> Parameter:
        """With the layer's number filled in, and what it is called here."""

        def filled(name: str) -> str:
            return name.replace("{layer}", str(number))

        loaded = self.loaded and replace(self.loaded, theirs=filled(self.loaded.theirs))
        name = self.name.replace("layers.{layer}", ours)
        return replace(self, name=name, theirs=filled(self.theirs), loaded=loaded)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of config.json that is a key of the model section.

    default   what transformers takes when it is left out; REQUIRED: it must be there
    also      another name that it may have there
    """

    ours: str
    theirs: str
    default: Any
    also: str | None = None

    def name_in(self, config: Mapping[str, Any]) -> str:
        """Of its two names that which a config.json has."""
        return self.also if self.also and self.also in config and self.theirs not in config else self.theirs


REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Window:
    """How config.json says which tokens a query sees.

    default    width that transformers takes when sliding_window is left out
    switched   whether use_sliding_window must be true for it to hold
    by_layer   whether layer_types says for which layers it holds (otherwise for all)
    """

    default: int | None
    switched: bool
    by_layer: bool


@dataclass(frozen=True)
class FamilyMapping:
    """A family in Hugging Face's words.

    window     None: there is none in this architecture
    theta      base of the rotary frequencies that transformers takes when it is left out
    fixed      fields that have one value in this family, which is also what leaving them out means
    unsaid     such fields that transformers does not have: written for other programs, not added to a folder's own
    implied    keys of ours that the architecture has one value of, and no field
    needed     keys of ours that it cannot be without: neither null nor none of them
    not_read   last parts of tensor names that are no parameters: buffers of old exports
    pairs      the field that says whether neighbouring features are turned together (left out: they are); None: the two
               halves of a head are, as here
    copied     (theirs, ours) of what every layer that predicts further tokens has a copy of
    """

    family: str
    architecture: str
    model_type: str
    fields: Sequence[Field]
    parameters: Sequence[Parameter]
    window: Window | None = None
    theta: float = 10000.0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()
    pairs: str | None = None
    copied: tuple[tuple[str, str], ...] = ()

    def paired(self, config: Mapping[str, Any] | None) -> bool:
        """Whether a folder with this config.json (None: the published form) pairs neighbouring features."""
        return self.pairs is not None and bool((config or {}).get(self.pairs, True))


@dataclass(frozen=True, slots=True)
class Part:
    """A Hugging Face tensor, or a run of its elements, as a box of a logical one.

    shape   of the box
    form    of the tensor there
    start   which element of it is the first of the box; the others follow it in the box's order
    """

    theirs: str
    offset: Dims
    shape: Dims
    form: Dims
    start: int = 0


@dataclass(frozen=True, slots=True)
class Logical:
    """A logical parameter, and the parts that tile it.

    rows   which of their rows is which of ours, where the order is another; the parts are in their order
    wide   as Parameter.wide
    """

    shape: Dims
    parts: tuple[Part, ...]
    rows: RowOrder | None = None
    wide: bool = False


def sizes(model: Model) -> dict[str, int]:
    """The names that shapes are written in; takes a resolved model."""
    assert model.head_dim is not None
    assert model.num_key_value_heads is not None
    heads, rope, latent = model.num_attention_heads, model.qk_rope_head_dim or 0, model.kv_lora_rank or 0
    values, features = model.v_head_dim or 0, model.moe_intermediate_size or 0
    return {
        "vocabulary": model.vocab_size,
        "hidden": model.hidden_size,
        "two hidden": 2 * model.hidden_size,
        "queries": model.num_attention_heads * model.head_dim,
        "keys": model.num_key_value_heads * model.head_dim,
        "head": model.head_dim,
        "features": model.intermediate_size,
        "experts": model.num_experts or 0,
        "expert features": features,
        "shared features": model.n_shared_experts * features,
        "balanced experts": 0 if model.router_bias_update_rate is None else model.num_experts or 0,
        "query latent": model.q_lora_rank or 0,
        "queries without latent": 0 if model.q_lora_rank else heads * model.head_dim,
        "latent": latent,
        "latent and shared key": latent + rope,
        "unturned": model.head_dim - rope,
        "keys and values": heads * (model.head_dim - rope + values),
        "values": heads * values,
    }


def logical_parameters(
    mapping: FamilyMapping, model: Model, there: Collection[str] = (), config: Mapping[str, Any] | None = None
) -> dict[str, Logical]:
    """Every logical parameter of a resolved model, in the model's order, and what else of its state a folder has.

    there    names of tensors in a folder: which of a parameter's two places it is in; without them the first
    config   the folder's config.json; None: the published form
    """
    pairs = mapping.paired(config)
    known = sizes(model)
    found = {}
    for parameter in _of_model(mapping, model):
        if parameter.tied_to and model.tie_word_embeddings:
            continue
        shape = tuple(known[size] for size in parameter.shape)
        if 0 in shape:
            continue
        rows = None
        if parameter.turned and pairs:
            block, first = (known[size] for size in parameter.turned)
            rows = RowOrder(block, first, pairs=True)
        found[parameter.name] = Logical(shape, _parts(parameter, shape, there), rows, parameter.wide)
    return found


def _parts(parameter: Parameter, shape: Dims, there: Collection[str]) -> tuple[Part, ...]:
    """Expert by expert, or whole."""
    loaded, theirs = parameter.loaded, parameter.theirs
    if loaded is not None and loaded.theirs in there:
        if loaded.of > 1:
            experts, rows, columns = shape
            whole = (experts, loaded.of * rows, columns)
            starts = [(expert * loaded.of + loaded.number) * rows * columns for expert in range(experts)]
            return tuple(
                Part(loaded.theirs, (expert, 0, 0), (1, rows, columns), whole, start)
                for expert, start in enumerate(starts)
            )
        theirs = loaded.theirs
    if "{expert}" not in theirs:
        return (Part(theirs, (0,) * len(shape), shape, shape),)
    form = shape[1:]
    return tuple(
        Part(theirs.replace("{expert}", str(expert)), (expert, *(0 for _ in form)), (1, *form), form)
        for expert in range(shape[0])
    )


def copies(mapping: FamilyMapping, model: Model) -> dict[str, str]:
    """Their name → ours, of tensors that a folder may hold beside the one that they are tied to."""
    tied = model.tie_word_embeddings
    return {p.theirs: p.tied_to for p in mapping.parameters if p.tied_to and tied} | written_copies(mapping, model)


def written_copies(mapping: FamilyMapping, model: Model) -> dict[str, str]:
    """Those that published folders do hold: of layers that predict further tokens, which others load alone."""
    tied = {p.name: p.tied_to for p in mapping.parameters if p.tied_to and model.tie_word_embeddings}
    behind = all_layers(model)[model.num_hidden_layers :]
    return {
        theirs.replace("{layer}", str(number)): tied.get(ours, ours)
        for number in behind
        for theirs, ours in mapping.copied
    }


def _of_model(mapping: FamilyMapping, model: Model) -> list[Parameter]:
    """Parameters with the layers' numbers filled in; those of a layer lie together."""
    found: list[Parameter] = []
    layers = [p for p in mapping.parameters if "{layer}" in p.name]
    for parameter in mapping.parameters:
        if parameter not in layers:
            found.append(parameter)
        elif parameter is layers[0]:
            for number in all_layers(model):
                sparse, behind = is_sparse(model, number), number >= model.num_hidden_layers
                of_this = [p for p in layers if p.sparse in (None, sparse) and (behind or not p.behind)]
                found += (p.of_layer(number, layer_name(model, number)) for p in of_this)
    return found
