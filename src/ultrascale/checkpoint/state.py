"""What of a run's memory goes into a checkpoint: masters and optimizer state, as boxes of logical tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ultrascale.checkpoint.boxes import Box, CheckpointError
from ultrascale.optim.optimizer import Optimizer


def state_boxes(optimizer: Optimizer, owned: bool) -> Iterator[Box]:
    """This rank's boxes: `<name>` of every parameter's master and of every buffer that is state of the run,
    `optimizer.<state>/<name>` of a parameter's moments.

    owned   True: each element on one rank in the whole world, what a save writes. False: all that this rank holds,
            what a load fills.
    Masters are the truth: copies in the compute dtype are rebuilt from them, and padding is no part of a box. Moments
    are stored as they are held, so that a run that goes on has their every bit.
    """
    store = optimizer.store
    for bucket in store.buckets:
        for span in bucket.spans:
            if owned and not store.counts(bucket, span):
                continue
            name, shape = span.layout.name, span.layout.shape
            for offset, values in store.pieces(bucket, span, bucket.masters):
                yield Box(name, shape, offset, values)
            for state, offset, values in optimizer.state_pieces(bucket, span):
                yield Box(f"optimizer.{state}/{name}", shape, offset, values)
    for kept in store.kept:
        if not owned or store.counts_kept(kept):
            offset, shape = kept.layout.box(store.mesh, store.rank)
            assert shape == tuple(kept.tensor.shape), f"{kept.layout.name}: a buffer has no padding"
            yield Box(kept.layout.name, kept.layout.shape, offset, kept.tensor)


def refuse_not_finite(boxes: Iterable[Box]) -> None:
    """Raises CheckpointError naming the parameters among the boxes that hold values that are not finite: nothing is
    saved over a healthy checkpoint.

    A sum is not finite when any term is not, and reads the values once; what only overflows is looked at again.
    """
    masters = ((box.name, box.tensor.detach()) for box in boxes if "/" not in box.name)
    found = {
        name
        for name, values in masters
        if values.is_floating_point()
        and not bool(torch.isfinite(values.sum()))
        and not bool(torch.isfinite(values).all())
    }
    if found:
        names = sorted(found)
        raise CheckpointError(f"{', '.join(names[:8])} hold values that are not finite: nothing is saved of them")
