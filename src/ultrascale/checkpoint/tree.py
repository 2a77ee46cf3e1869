"""Tensors by name as a tree that a person reads: layers that are alike stand there once. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

_NUMBERED = re.compile(r"(?P<before>.*?\.)(?P<number>\d+)(?P<after>\..*)")

Row = tuple[str, str]
"""Indented name, and what is said of it."""


def human_bytes(count: int) -> str:
    """1536 → "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def tree(tensors: Sequence[dict[str, Any]], every: bool = False) -> list[Row]:
    """Rows of the tensors as `inspection.describe` gives them.

    every   one row for each tensor; otherwise layers whose tensors have the same names, shapes and dtypes are one
    """
    parts: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        state, slash, name = tensor["name"].rpartition("/")
        parts.setdefault(state if slash else "parameters", []).append({**tensor, "name": name})
    rows: list[Row] = []
    for part, members in parts.items():
        rows.append((part, _sum(members)))
        rows += ((f"  {name}", text) for name, text in _part(members, every))
    return rows


def _part(members: list[dict[str, Any]], every: bool) -> Iterator[Row]:
    layers: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for tensor in members:
        found = None if every else _NUMBERED.fullmatch(tensor["name"])
        if found is None:
            yield tensor["name"], _one(tensor)
        else:
            inner = {**tensor, "name": found["after"].removeprefix(".")}
            layers.setdefault((found["before"], int(found["number"])), []).append(inner)
    runs: list[list[tuple[str, int]]] = []
    for key in sorted(layers):
        last = runs[-1][-1] if runs else None
        if last and last[0] == key[0] and last[1] + 1 == key[1] and _form(layers[last]) == _form(layers[key]):
            runs[-1].append(key)
        else:
            runs.append([key])
    for run in runs:
        (before, first), (_, last_number) = run[0], run[-1]
        name = f"{before}{first}" if len(run) == 1 else f"{before}{first} … {last_number}"
        inside = [tensor for key in run for tensor in layers[key]]
        yield name, _sum(inside)
        for place, tensor in enumerate(layers[run[0]]):
            alike = [layers[key][place] for key in run]
            yield f"  {tensor['name']}", _one(tensor, alike)


def _form(layer: list[dict[str, Any]]) -> list[Any]:
    return [(tensor["name"], tensor["shape"], tensor["dtype"]) for tensor in layer]


def _sum(members: Sequence[dict[str, Any]]) -> str:
    count = len(members)
    text = f"{count} tensor{'s' if count > 1 else ''}, {human_bytes(sum(tensor['bytes'] for tensor in members))}"
    norms = [tensor["norm"] for tensor in members if "norm" in tensor]
    return text + (f", norm {sum(norm**2 for norm in norms) ** 0.5:.6g}" if norms else "")


def _one(tensor: dict[str, Any], alike: Sequence[dict[str, Any]] = ()) -> str:
    text = f"{tensor['shape']} {tensor['dtype']}, {human_bytes(tensor['bytes'])}"
    norms = [other["norm"] for other in (alike or [tensor]) if "norm" in other]
    if not norms:
        return text
    low, high = min(norms), max(norms)
    return text + (f", norm {low:.6g}" if low == high else f", norm {low:.6g} … {high:.6g}")
