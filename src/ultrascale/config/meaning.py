"""Which keys say what a run *is*: they may not change between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A clause for each key of meaning that differs between two resolved configs (nested mappings)."""
    before, now = _pick(saved), _pick(current)
    missing = object()
    return [
        f"{key} was {before.get(key, 'not set')!r} and is {now.get(key, 'not set')!r}"
        for key in {**before, **now}
        if before.get(key, missing) != now.get(key, missing)
    ]


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
