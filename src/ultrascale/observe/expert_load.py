"""How evenly a step's tokens fell on the experts of each layer, in two figures that need no number of experts beside
them: the load of the busiest one over the mean, and the entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence

Tokens = Sequence[int]
"""How many each expert of a layer got."""


def balance_figures(layers: Sequence[Tokens]) -> dict[str, list[float | None]]:
    """What metrics.jsonl says of the load: lists with a figure for each layer; null for one that no token reached."""
    return {"expert_load": [busiest(tokens) for tokens in layers], "expert_entropy": [entropy(t) for t in layers]}


def dropped_figures(layers: Sequence[Tokens], dropped: Sequence[int]) -> dict[str, list[int] | list[float]]:
    """What it says of choices for which experts had no room, by layer: how many, and their share of all choices."""
    shares = [count / max(1, sum(tokens)) for tokens, count in zip(layers, dropped, strict=True)]
    return {"expert_dropped": list(dropped), "expert_dropped_share": shares}


def busiest(tokens: Tokens) -> float | None:
    """The largest count over the mean one: 1 when all are alike, experts / k when k of them get everything."""
    total = sum(tokens)
    return max(tokens) * len(tokens) / total if total else None


def entropy(tokens: Tokens) -> float | None:
    """Of the shares, over log(experts): 1 when all are alike, 0 when one gets everything."""
    total = sum(tokens)
    if not total:
        return None
    if len(tokens) == 1:
        return 1.0
    return (math.log(total) - sum(n * math.log(n) for n in tokens if n) / total) / math.log(len(tokens))
