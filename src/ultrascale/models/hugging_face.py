"""How a family stands in a Hugging Face folder: its parameters' names there, and its fields of config.json, as data.

The data of the families of the tree are in `hugging_face_families.py`; here is what is done with them, the same for
all. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from pydantic import ValidationError

from ultrascale.config.schema import Model, RopeScaling
from ultrascale.models.sizes import is_sparse

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

    name     ours; `{layer}` stands for the layer's number
    theirs   Hugging Face's; with `{expert}` a tensor for each place along our first dim
    shape    sizes by their names in `sizes`
    tied_to  ours that it is the same as under model.tie_word_embeddings: then it is not stored twice
    sparse   whether layers with experts have it, or those without; None: all
    loaded   a second place where it may lie
    """

    name: str
    theirs: str
    shape: tuple[str, ...]
    tied_to: str | None = None
    sparse: bool | None = None
    loaded: Loaded | None = None

    def of_layer(self, number: int) -> Parameter:
        """With the layer's number filled in."""

        def filled(name: str) -> str:
            return name.replace("{layer}", str(number))

        loaded = self.loaded and replace(self.loaded, theirs=filled(self.loaded.theirs))
        return replace(self, name=filled(self.name), theirs=filled(self.theirs), loaded=loaded)


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
    not_read   last parts of tensor names that are no parameters: buffers of old exports
    """

    family: str
    architecture: str
    model_type: str
    fields: Sequence[Field]
    parameters: Sequence[Parameter]
    window: Window | None = None
    theta: float = 10000.0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()


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
    """A logical parameter, and the parts that tile it."""

    shape: Dims
    parts: tuple[Part, ...]


def sizes(model: Model) -> dict[str, int]:
    """The names that shapes are written in; takes a resolved model."""
    assert model.head_dim is not None
    assert model.num_key_value_heads is not None
    return {
        "vocabulary": model.vocab_size,
        "hidden": model.hidden_size,
        "queries": model.num_attention_heads * model.head_dim,
        "keys": model.num_key_value_heads * model.head_dim,
        "head": model.head_dim,
        "features": model.intermediate_size,
        "experts": model.num_experts or 0,
        "expert features": model.moe_intermediate_size or 0,
    }


def logical_parameters(mapping: FamilyMapping, model: Model, there: Collection[str] = ()) -> dict[str, Logical]:
    """Every logical parameter of a resolved model, in the model's order.

    there   names of tensors in a folder: which of a parameter's two places it is in; without them the first
    """
    known = sizes(model)
    found = {}
    for parameter in _of_model(mapping, model):
        if parameter.tied_to and model.tie_word_embeddings:
            continue
        shape = tuple(known[size] for size in parameter.shape)
        found[parameter.name] = Logical(shape, _parts(parameter, shape, there))
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
    return {p.theirs: p.tied_to for p in mapping.parameters if p.tied_to and tied}


def _of_model(mapping: FamilyMapping, model: Model) -> list[Parameter]:
    """Parameters with the layers' numbers filled in; those of a layer lie together."""
    found: list[Parameter] = []
    layers = [p for p in mapping.parameters if "{layer}" in p.name]
    for parameter in mapping.parameters:
        if parameter not in layers:
            found.append(parameter)
        elif parameter is layers[0]:
            for number in range(model.num_hidden_layers):
                sparse = is_sparse(model, number)
                found += (p.of_layer(number) for p in layers if p.sparse in (None, sparse))
    return found


# ---- config.json ----------------------------------------------------------------------------------------------------


def model_of(mapping: FamilyMapping, config: Mapping[str, Any]) -> Model:
    """The resolved model section that a config.json describes.

    Raises HuggingFaceError when it describes what the family is not: a field with another value than the fixed one, a
    kind of rope scaling that is not known, sizes that are missing or make no sense.
    """
    problems = [
        f"{key}={config[key]!r} is not what {mapping.architecture} has here, which is {value!r}"
        for key, value in mapping.fixed.items()
        if config.get(key, value) != value
    ]
    values: dict[str, Any] = {"family": mapping.family}
    for one in mapping.fields:
        value = config.get(one.name_in(config), one.default)
        if value is REQUIRED:
            problems.append(f"{one.theirs} is missing")
        else:
            values[one.ours] = value
    values |= _rope(mapping.theta, config, problems)
    values |= _window(mapping.window, config, problems)
    if not problems:
        try:
            return _resolved(Model.model_validate(values))
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=False):
                problems.append(f"{'.'.join(map(str, detail['loc']))}={detail['input']!r}: {detail['msg']}")
        except ValueError as error:
            problems.append(str(error))
    raise HuggingFaceError("config.json: " + "; ".join(dict.fromkeys(problems)))


def _resolved(model: Model) -> Model:
    heads, width = model.num_attention_heads, model.hidden_size
    if model.head_dim is None and width % heads:
        raise ValueError(f"num_attention_heads={heads} does not divide hidden_size={width}, and there is no head_dim")
    filled = {
        "head_dim": model.head_dim or width // heads,
        "num_key_value_heads": model.num_key_value_heads or heads,
    }
    return model.model_copy(update=filled)


_SCALINGS = [kind.model_fields["rope_type"].annotation.__args__[0] for kind in get_args(get_args(RopeScaling)[0])]
_BESIDE_SCALING = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def _rope(default: float, config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """rope_theta and rope_scaling, in the words of transformers 5 (rope_parameters) or of those before it."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if by_layer := [key for key, value in given.items() if isinstance(value, Mapping)]:
        problems.append(f"rope_parameters differ between {' and '.join(by_layer)}: here all layers have the same")
    theta = given.get("rope_theta", config.get("rope_theta", default))
    kind = given.get("rope_type", given.get("type", "default"))
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        problems.append(f"partial_rotary_factor={partial!r}: all of a head is rotated here")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in _SCALINGS:
        problems.append(f"rope_type={kind!r} is not known; default, {', '.join(_SCALINGS)} are")
        return {}
    section = {key: value for key, value in given.items() if key not in _BESIDE_SCALING and value is not None}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **section}}


SLIDING, FULL = "sliding_attention", "full_attention"


def _window(window: Window | None, config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """sliding_window and layer_types."""
    if window is None:
        return {}
    width = config.get("sliding_window", window.default)
    if window.switched and not config.get("use_sliding_window", False):
        width = None
    if not window.by_layer:
        return {"sliding_window": width}
    layers = config.get("num_hidden_layers", 0)
    types = config.get("layer_types")
    if types is None:
        # transformers' rule: the first max_window_layers see all, of which the default is 28.
        first = config.get("max_window_layers", 28)
        types = [SLIDING if width is not None and layer >= first else FULL for layer in range(layers)]
    if width is None and SLIDING in types:
        problems.append(f"layer_types names {SLIDING}, and there is no sliding_window that holds")
    if SLIDING not in types:
        return {}
    return {"sliding_window": width, "layer_types": None if FULL not in types else tuple(types)}


def _window_fields(window: Window | None, model: Model) -> dict[str, Any]:
    if window is None:
        return {}
    fields: dict[str, Any] = {"sliding_window": model.sliding_window}
    if window.switched:
        fields["use_sliding_window"] = model.sliding_window is not None
    if window.by_layer:
        everywhere = FULL if model.sliding_window is None else SLIDING
        fields["layer_types"] = list(model.layer_types or [everywhere] * model.num_hidden_layers)
    return fields


def unsaid(mapping: FamilyMapping, model: Model) -> list[str]:
    """A clause for each key of a resolved model that the architecture has no word for and is not at its default."""
    said = {one.ours for one in mapping.fields} | {"rope_theta", "rope_scaling", *NOT_OF_THE_WEIGHTS}
    if mapping.window is not None:
        said |= {"sliding_window", "layer_types"} if mapping.window.by_layer else {"sliding_window"}
    return [
        f"model.{key}={_plain(getattr(model, key))}"
        for key, known in Model.model_fields.items()
        if key not in said and getattr(model, key) != known.get_default(call_default_factory=True)
    ]


def config_json(
    mapping: FamilyMapping, model: Model, dtype: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a resolved model.

    base   that of the folder which the weights came from: what it says beside the model (ids of special tokens and
           the like) is kept
    """
    config = dict(base or {})
    config |= {"architectures": [mapping.architecture], "model_type": mapping.model_type}
    config |= {one.name_in(config): getattr(model, one.ours) for one in mapping.fields}
    config |= {key: value for key, value in mapping.fixed.items() if value is not None}
    config |= _window_fields(mapping.window, model)
    scaling = None if model.rope_scaling is None else model.rope_scaling.model_dump(exclude_none=True)
    if "rope_parameters" in config:
        config["rope_parameters"] = {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})}
        config.pop("rope_theta", None)
        config.pop("rope_scaling", None)
    else:
        config |= {"rope_theta": model.rope_theta, "rope_scaling": scaling}
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    return config


NOT_OF_THE_WEIGHTS = (
    "family",
    "max_position_embeddings",
    "initializer_range",
    "depth_scaled_init",
    "label_smoothing",
    "z_loss_coefficient",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "options",
)
"""Keys of the model section that say nothing of what weights do: they may differ from those of a folder."""


def differences(configured: Model, found: Model) -> list[str]:
    """A clause for each key in which two resolved models differ so that the weights of the one are not the other's."""
    return [
        f"model.{key}={_plain(getattr(configured, key))} is {_plain(getattr(found, key))} there"
        for key in Model.model_fields
        if key not in NOT_OF_THE_WEIGHTS and getattr(configured, key) != getattr(found, key)
    ]


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else "null" if value is None else value
