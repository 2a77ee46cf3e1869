"""Makes the way that tokens take to the experts of a layer."""

from __future__ import annotations

from typing import Any

import torch

from ultrascale.parallel.experts.all_gather import AllGather
from ultrascale.parallel.experts.all_to_all import AllToAll
from ultrascale.parallel.experts.deep_ep import DeepEP
from ultrascale.parallel.experts.dispatch import Dispatch, ExpertGroups

KINDS: dict[str, type[Dispatch[Any]]] = {"all_to_all": AllToAll, "all_gather": AllGather, "deep_ep": DeepEP}


def make_dispatch(groups: ExpertGroups, experts: int, sums: torch.dtype) -> Dispatch[Any]:
    """Of one layer; what is in it needs no memory and no other rank before the first tokens."""
    return KINDS[groups.dispatch](groups, experts, sums)
