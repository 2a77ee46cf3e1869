"""Which keys say what a run *is*: between a checkpoint and the run that goes on from it they change only by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrascale.config.schema import Config, Data

MEANING = (
    "run.seed",
    "model",
    "batch.global_size",
    "batch.sequence_length",
    "optimizer",
    "schedule",
    "precision.compute",
)
"""Keys, or whole sections. The data count by their content (`Data.fingerprint`), not by their path; everything else may
change: layout, length, folder, recompute, how often something is saved or shown."""

PLACES = ("optimizer.offload",)
"""Keys of those sections that say where something lies, and may change too."""

CONTENT = ("data.train", "data.tokenizer")
"""Either stands for the tokens of the training data and the weights of their blend."""

SHAPES = tuple(
    f"model.{name}"
    for name in (
        "family",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "num_experts",
        "moe_intermediate_size",
        "n_shared_experts",
        "decoder_sparse_step",
        "mlp_only_layers",
        "first_k_dense_replace",
        "router_aux_loss_scope",
        "num_nextn_predict_layers",
        "vocab_size",
        "tie_word_embeddings",
    )
)
"""Keys of meaning that no permission changes: saved tensors would not fit, or would be cut into other heads."""


@dataclass(frozen=True)
class Change:
    """Something that is not as it was in the run that is gone on from."""

    keys: tuple[str, ...]
    """`checkpoint.allow_changes` permits it by any of these."""
    text: str
    """A clause: what it was, and what it is."""


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """Each key of meaning that differs between two resolved configs (nested mappings)."""
    before, now = _pick(saved), _pick(current)
    missing = object()
    return [
        Change((key,), _clause(key, before.get(key, "not set"), now.get(key, "not set")))
        for key in {**before, **now}
        if before.get(key, missing) != now.get(key, missing)
    ]


def other_samples(changes: Sequence[Change]) -> bool:
    """Whether the next step reads elsewhere than where the last one stopped."""
    keys = [key for change in changes for key in change.keys]
    return any(key == "run.seed" or key.startswith(("batch.", "data.")) for key in keys)


def refused(changes: Sequence[Change], current: Mapping[str, Any]) -> list[Change]:
    """Those that the current config's `checkpoint.allow_changes` does not name."""
    allowed = set(_allowed(current)) - set(SHAPES)
    return [change for change in changes if allowed.isdisjoint(change.keys)]


def way_out(changes: Sequence[Change], current: Mapping[str, Any]) -> str:
    """What to do about refused changes, short of a new run."""
    if any(key in SHAPES for change in changes for key in change.keys):
        return "set these back"
    names = dict.fromkeys([*_allowed(current), *(change.keys[0] for change in changes)])
    return f"set these back, or, where they are meant, add checkpoint.allow_changes=[{','.join(names)}]"


def nameable() -> list[str]:
    """The keys that `checkpoint.allow_changes` may name."""
    names = []
    for name in MEANING:
        section, _, key = name.partition(".")
        model = Config.model_fields[section].annotation
        assert model is not None
        names += [name] if key else [f"{section}.{field}" for field in model.model_fields]
    names += [f"data.{field}" for field in Data.model_fields if field != "validation"]
    return [name for name in names if name not in (*PLACES, *SHAPES)]


def _allowed(config: Mapping[str, Any]) -> Sequence[str]:
    return (config.get("checkpoint") or {}).get("allow_changes") or ()


def _clause(key: str, before: Any, now: Any) -> str:
    """Of two sections only what differs in them, unless they have nothing in common."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.keys() == now.keys():
        differing = [name for name in before if before[name] != now[name]]
        return "; ".join(_clause(f"{key}.{name}", before[name], now[name]) for name in differing)
    return f"{key} was {before!r} and is {now!r}"


def _pick(tree: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in MEANING:
        section, _, key = name.partition(".")
        values = tree.get(section) or {}
        found |= {f"{section}.{k}": _plain(v) for k, v in values.items() if not key or k == key}
    return {key: value for key, value in found.items() if key not in PLACES}


def _plain(value: Any) -> Any:
    """Tuples as the lists that files give back."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
