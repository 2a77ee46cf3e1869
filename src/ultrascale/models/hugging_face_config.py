"""config.json and the model section: each read into the other, by the data of `hugging_face_families.py`. Needs no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from ultrascale.config.model_section import Model, RopeScaling
from ultrascale.models.hugging_face import REQUIRED, FamilyMapping, HuggingFaceError, Window


def model_of(mapping: FamilyMapping, config: Mapping[str, Any]) -> Model:
    """The resolved model section that a config.json describes.

    Raises HuggingFaceError when it describes what the family is not: a field with another value than the fixed one, a
    kind of rope scaling that is not known, sizes that are missing or make no sense.
    """
    problems = [
        f"{key}={config[key]!r} is not what {mapping.architecture} has here, which is {value!r}"
        for key, value in {**mapping.fixed, **mapping.unsaid}.items()
        if config.get(key, value) != value
    ]
    values: dict[str, Any] = {"family": mapping.family, **mapping.implied}
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
    heads, width, head_dim = model.num_attention_heads, model.hidden_size, model.head_dim
    if model.qk_nope_head_dim and model.qk_rope_head_dim:
        head_dim = model.qk_nope_head_dim + model.qk_rope_head_dim
    if head_dim is None and width % heads:
        raise ValueError(f"num_attention_heads={heads} does not divide hidden_size={width}, and there is no head_dim")
    filled = {
        "head_dim": head_dim or width // heads,
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
    """A clause for each key of a resolved model that the architecture has no word for and is not at its default (nor at
    what the architecture implies), or that it cannot be without."""
    said = {one.ours for one in mapping.fields} | {"rope_theta", "rope_scaling", *NOT_OF_THE_WEIGHTS}
    if mapping.window is not None:
        said |= {"sliding_window", "layer_types"} if mapping.window.by_layer else {"sliding_window"}
    if model.qk_rope_head_dim is not None:
        said.add("head_dim")  # made of two others
    wanted = {key: known.get_default(call_default_factory=True) for key, known in Model.model_fields.items()}
    wanted |= mapping.implied
    lacking = [key for key in mapping.needed if getattr(model, key) is None or _none(getattr(model, key))]
    other = [key for key in wanted if key not in said and getattr(model, key) != wanted[key]]
    return [f"model.{key}={_plain(getattr(model, key))}" for key in dict.fromkeys([*lacking, *other])]


def _none(value: Any) -> bool:
    """Whether it is a number of things of which there are none: a rate of 0.0 is not."""
    return type(value) is int and value == 0


def config_json(
    mapping: FamilyMapping, model: Model, dtype: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a resolved model.

    base   that of the folder which the weights came from: what it says beside the model (ids of special tokens and
           the like) is kept
    """
    config = {key: value for key, value in (base or {}).items() if key != QUANTISATION}
    if base is None:
        config |= mapping.unsaid
    config |= {"architectures": [mapping.architecture], "model_type": mapping.model_type}
    config |= {one.name_in(config): getattr(model, one.ours) for one in mapping.fields}
    config |= {key: value for key, value in mapping.fixed.items() if value is not None}
    if mapping.pairs is not None:
        config[mapping.pairs] = mapping.paired(base)
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


BIAS = "router_bias_update_rate"
QUANTISATION = "quantization_config"
"""The field that says how weights were made narrower than their dtype; what is written never is."""

NOT_OF_THE_WEIGHTS = (
    "family",
    "max_position_embeddings",
    "initializer_range",
    "depth_scaled_init",
    "label_smoothing",
    "z_loss_coefficient",
    "mtp_loss_coefficient",
    "router_aux_loss_coef",
    "router_aux_loss_scope",
    "router_z_loss_coef",
    "router_jitter_noise",
    "expert_capacity_factor",
    BIAS,
    "options",
)
"""Keys of the model section that say nothing of what weights do: they may differ from those of a folder. Of `BIAS` it
counts whether there is one, not how fast it moves."""


def differences(configured: Model, found: Model) -> list[str]:
    """A clause for each key in which two resolved models differ so that the weights of the one are not the other's."""
    return [
        f"model.{key}={_plain(getattr(configured, key))} is {_plain(getattr(found, key))} there"
        for key in Model.model_fields
        if (key not in NOT_OF_THE_WEIGHTS and getattr(configured, key) != getattr(found, key))
        or (key == BIAS and (configured.router_bias_update_rate is None) != (found.router_bias_update_rate is None))
    ]


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else "null" if value is None else value
