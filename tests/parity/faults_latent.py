"""Faults of latent attention: what tp replicates."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest.mock import patch

import torch
from fault_registry import Patch, fault

from ultrascale.comm import differentiable
from ultrascale.comm.group import Group
from ultrascale.models import mla
from ultrascale.parallel import tensor
from ultrascale.parallel.layout import Layout, Use


@fault
def gradients_of_the_shared_key_are_not_summed() -> Patch:
    """Each tp rank keeps what its own heads say of the key that all heads share."""
    patches = contextlib.ExitStack()
    patches.enter_context(patch.object(differentiable, "gather", differentiable.gather_copies))
    patches.enter_context(patch.object(differentiable, "copy_to", lambda x, group: x))
    return patches


@fault
def weights_that_make_latents_keep_their_own_tokens_gradients() -> Patch:
    """Under sequence parallelism each tp rank makes the latents of its own tokens; a layout that says otherwise."""
    original = mla.replicated_matrix

    def used_alike(*args: Any) -> Layout:
        return dataclasses.replace(original(*args), used_in=Use.WHOLE)

    return patch.object(mla, "replicated_matrix", used_alike)


@fault
def gradients_of_latents_are_not_summed() -> Patch:
    """What the heads of one tp rank say of a latent goes back through weights that all ranks hold."""
    original = tensor.column_parallel

    def column_parallel(
        x: torch.Tensor, weight: torch.Tensor, group: Group, sequence_parallel: bool, current: Any, name: str = ""
    ) -> torch.Tensor:
        if name.endswith("_b_proj.weight") and not sequence_parallel:
            group = Group((), (group.ranks[group.index],), 0, None, group.ledger)
        return original(x, weight, group, sequence_parallel, current, name)

    return patch.object(tensor, "column_parallel", column_parallel)
