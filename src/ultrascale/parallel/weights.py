"""Where modules find their parameters when replicas share them out: gathered before use, dropped after it.

At ZeRO stages 1 and 2 every rank keeps all weights in the compute dtype; after an optimizer step each has new values of
its own shard only, and gathers the others while the next forward begins. At stage 3 it keeps only its shard; a unit's
weights are gathered for each pass through the unit and dropped behind it, some units ahead of their use.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.parallel.buckets import Bucket, Use
from ultrascale.parallel.passes import Visit
from ultrascale.parallel.store import Store


class Weights:
    """Gathers and drops the weights of a store's buckets.

    prefetch   units that are gathered ahead of the one that is computed (stage 3)
    overlap    False: wait for every gather where it is issued
    """

    def __init__(self, store: Store, prefetch: int, overlap: bool = True) -> None:
        self.store, self.prefetch, self.overlap = store, prefetch, overlap
        self.shared_out = store.sharding.stage == 3
        self._of_use: dict[Use, list[Bucket]] = {}
        for bucket in store.buckets:
            for use in bucket.uses:
                self._of_use.setdefault(use, []).append(bucket)
        self._gathering: dict[Bucket, tuple[Pending, torch.Tensor]] = {}
        self._users: dict[Bucket, int] = dict.fromkeys(store.buckets, 0)
        """Visits under way, and stages that are kept gathered."""
        self._visits: list[Visit] = []
        self._place: dict[Visit, int] = {}
        self._open: set[Visit] = set()

    # ---- passes through units -------------------------------------------------------------------------------------

    def follow(self, visits: Iterable[Visit]) -> None:
        """Says which units the coming run passes through, in what order: what is gathered ahead."""
        self._visits = list(visits)
        self._place = {visit: place for place, visit in enumerate(self._visits)}

    def enter(self, visit: Visit) -> None:
        """Waits for the unit's weights, and issues the gathers of those that follow."""
        for bucket in self._of_use.get((visit.stage, visit.unit), ()):
            if self.shared_out:
                self._users[bucket] += 1
                self._issue(bucket)
            self._wait(bucket)
        if not self.shared_out:
            return
        self._open.add(visit)
        place = self._place[visit]
        for ahead in self._visits[place + 1 : place + 1 + self.prefetch]:
            for bucket in self._of_use.get((ahead.stage, ahead.unit), ()):
                self._issue(bucket)

    def leave(self, visit: Visit) -> None:
        """Drops the unit's weights, unless another pass is in it."""
        if self.shared_out and visit in self._open:
            self._open.discard(visit)
            self._release(self._of_use.get((visit.stage, visit.unit), ()))

    def end(self, stage: int, micro_batch: int) -> None:
        """The end of a backward pass: leaves units whose end nothing else says (the first has no input gradient)."""
        for visit in [v for v in self._open if v.backward and (v.stage, v.micro_batch) == (stage, micro_batch)]:
            self.leave(visit)

    # ---- whole stages (the UNSHARD and RESHARD actions) -----------------------------------------------------------

    def unshard(self, stage: int) -> None:
        """Keeps what is gathered of the stage until `reshard`."""
        for bucket in self._of_stage(stage):
            self._users[bucket] += 1

    def reshard(self, stage: int) -> None:
        """Drops the stage's weights, but for units that a pass is in."""
        self._release(self._of_stage(stage))

    def _of_stage(self, stage: int) -> list[Bucket]:
        return [bucket for bucket in self.store.buckets if any(use[0] == stage for use in bucket.uses)]

    # ---- gathers --------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """After masters have changed: rebuilds this rank's weights, and gathers those of the other shards."""
        for bucket in reversed(self.store.buckets):
            self._wait(bucket)  # a gather of what was there before, which no pass has come to use
            if bucket.piece is not bucket.masters:
                bucket.piece.copy_(bucket.masters)
        if self.store.sharding.stage in (1, 2):
            for bucket in reversed(self.store.buckets):
                self._issue(bucket)

    def settle(self) -> None:
        """Waits for all gathers that are under way: what ranks keep of the weights may then be looked at."""
        for bucket in list(self._gathering):
            self._wait(bucket)

    def _issue(self, bucket: Bucket) -> None:
        """Begins a gather, if the weights are not there or on their way."""
        if bucket in self._gathering or (self.shared_out and bucket.weights is not None):
            return
        group = self.store.group_of(bucket.shard_axes)
        if self.shared_out:
            flat = bucket.piece.new_empty(bucket.numel)
        else:
            assert bucket.weights is not None
            flat = bucket.weights
        with group.ledger.during("gather"):
            pending = collectives.all_gather(bucket.piece, group, into=flat)
        self._gathering[bucket] = (pending, flat)
        if not self.overlap:
            self._wait(bucket)

    def _wait(self, bucket: Bucket) -> None:
        """Ends a gather that is under way."""
        if bucket not in self._gathering:
            return
        pending, flat = self._gathering[bucket]
        pending.wait()
        # Only now: while this pass waited, another may have come for the same weights.
        self._gathering.pop(bucket, None)
        if bucket.weights is not flat:
            bucket.weights = flat
            self.store.show(bucket)

    def _release(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._users[bucket] -= 1
            if not self._users[bucket] and bucket.weights is not None:
                bucket.weights = None
                self.store.show(bucket)
