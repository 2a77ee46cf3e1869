"""What of a run's memory goes into a checkpoint: masters and optimizer state, as boxes of logical tensors."""

from __future__ import annotations

from collections.abc import Iterator

from ultrascale.checkpoint.boxes import Box
from ultrascale.optim.optimizer import Optimizer


def state_boxes(optimizer: Optimizer, owned: bool) -> Iterator[Box]:
    """This rank's boxes: `<name>` of every parameter's master, `optimizer.<state>/<name>` of its moments.

    owned   True: each element on one rank in the whole world, what a save writes. False: all that this rank holds,
            what a load fills.
    Masters are the truth: copies in the compute dtype are rebuilt from them, and padding is no part of a box.
    """
    gradients = optimizer.gradients
    for bucket, state in zip(gradients.buckets, optimizer.state, strict=True):
        buffers = {"": bucket.masters, **{f"optimizer.{name}/": buffer for name, buffer in state.items()}}
        for span in bucket.spans:
            if owned and not gradients.counts(bucket, span):
                continue
            offset, _ = span.layout.box(gradients.mesh, gradients.rank)
            for prefix, buffer in buffers.items():
                yield Box(prefix + span.layout.name, span.layout.shape, offset, gradients.valid(buffer, span))
