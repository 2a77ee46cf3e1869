"""Faults of multi-token prediction: what is read ahead, and what is used again on the last stage."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

from fault_registry import Patch, fault

from ultrascale import step as stepping
from ultrascale.models import mtp
from ultrascale.models.batch import MicroBatch
from ultrascale.models.mtp import FurtherToken
from ultrascale.parallel.module import Build


@fault
def tokens_ahead_are_read_from_this_ranks_own() -> Patch:
    """What is predicted from is shifted after the cut: the next token of a piece is that of the place behind it."""
    original = stepping.micro_batch

    def micro_batch(*args: Any) -> MicroBatch:
        whole = original(*args)
        ahead = tuple(whole.inputs.roll(-depth, 0) for depth in range(1, 1 + len(whole.further_inputs)))
        return dataclasses.replace(whole, further_inputs=ahead)

    return patch.object(stepping, "micro_batch", micro_batch)


@fault
def depths_are_numbered_backwards_under_a_pipeline() -> Patch:
    """A layer behind the last is another one than in one process."""
    original = FurtherToken.__init__

    def wrong(self: FurtherToken, build: Build, model: Any, depth: int, *args: Any) -> None:
        original(self, build, model, depth if build.mesh.size(("pp",)) == 1 else 1 - depth, *args)

    return patch.object(FurtherToken, "__init__", wrong)


@fault
def projections_are_taken_for_used_alike_over_tp() -> Patch:
    """Under sequence parallelism each tp rank projects its own tokens; a layout that says otherwise."""
    original = mtp.replicated_matrix

    def used_alike(name: str, rows: int, columns: int, build: Build, std: float) -> Any:
        return original(name, rows, columns, dataclasses.replace(build, sequence_parallel=False), std)

    return patch.object(mtp, "replicated_matrix", used_alike)


@fault
def losses_of_further_tokens_are_divided_by_local_counts() -> Patch:
    """Each rank divides them by its own targets."""
    original = stepping.with_denominators

    def with_denominators(assembly: Any, micro_batches: Any) -> Any:
        batch = original(assembly, micro_batches)
        own = {
            mtp.targets(depth): sum(int((m.labels[depth + 1] != stepping.NO_TARGET).sum()) for m in micro_batches)
            for depth in range(assembly.config.model.num_nextn_predict_layers)
        }
        return dataclasses.replace(batch, denominators={**batch.denominators, **own})

    return patch.object(stepping, "with_denominators", with_denominators)
