"""What this rank holds of the model: stored tensors in flat buckets, cut over replicas as the ZeRO stage says.

Everything that walks over parameters (optimizer, norm, checkpoint, checks) walks over the buckets here, and sees of
each span the elements that are this rank's, as boxes of the logical tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn

from ultrascale.comm.group import Group
from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.buckets import Bucket, Held, Span, Use, make_buckets
from ultrascale.parallel.init import initialise
from ultrascale.parallel.layout import Layout, Tie
from ultrascale.parallel.module import Entry, Module, stored_tensors
from ultrascale.parallel.shards import Sharding
from ultrascale.precision.policy import Policy


@dataclass(frozen=True, slots=True)
class Kept:
    """A buffer that is state of the run."""

    layout: Layout
    stage: int
    module: Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.module, self.attribute)


class Store:
    """Buckets of all stages on this rank, and their memory.

    stages         stage → its units in order of use, (name, module)
    group_of       communication group of some leaf axes, seen from this rank (size 1 when they have size 1)
    copies_of      the group over pp that holds copies of a stage's parameters, or of a tie's (size 1: no other copy)
    bucket_bytes   up to which units share a bucket, at ZeRO stages 0 and 1
    """

    def __init__(
        self,
        stages: Mapping[int, list[tuple[str, nn.Module]]],
        mesh: Mesh,
        rank: int,
        policy: Policy,
        sharding: Sharding,
        group_of: Callable[[tuple[str, ...]], Group],
        copies_of: Callable[[int | str], Group],
        bucket_bytes: int,
    ) -> None:
        self.mesh, self.rank, self.policy, self.sharding = mesh, rank, policy, sharding
        self.group_of, self._copies_of = group_of, copies_of
        self.bucket_bytes = bucket_bytes
        self.units = {stage: [name for name, _ in units] for stage, units in stages.items()}
        self._roots = {stage: [module for _, module in units] for stage, units in stages.items()}
        self.buckets: list[Bucket] = []
        self._aliases: dict[int, nn.Parameter] = {}
        """A tied parameter's further tensors on this rank (by id) → the one that is stored."""
        self._make_buckets(stages)
        self._held: dict[tuple[Bucket, int, int], tuple[Held, ...]] = {}
        self.place: dict[int, tuple[Bucket, int, tuple[int, ...]]] = {}
        """Parameter (by id) → its bucket, where it begins, its shape."""
        self.kept = list(self._find_kept())
        """Buffers of modules that are state of the run; whole on every rank that has the module: they are small."""

    def _make_buckets(self, stages: Mapping[int, list[tuple[str, nn.Module]]]) -> None:
        """Buckets of all stages; stages of one rank that use a tied parameter share one tensor of it."""
        ties: dict[str, Entry] = {}
        further: dict[str, list[Use]] = {}
        for stage, units in stages.items():
            entries = []
            for entry in stored_tensors(units):
                tie = entry.stored.members[0].tie
                if tie and tie.group in ties:
                    self._aliases[id(entry.parameter)] = ties[tie.group].parameter
                    further.setdefault(tie.group, []).extend((stage, unit) for unit in entry.units)
                    continue
                if tie:
                    ties[tie.group] = entry
                entries.append(entry)
            self.buckets += make_buckets(
                stage, entries, self.mesh, self.rank, self.policy, self.sharding, self.bucket_bytes
            )
        for bucket in self.buckets:
            bucket.uses += tuple(further.get(bucket.tie or "", ()))

    # ---- memory ---------------------------------------------------------------------------------------------------

    def materialise(self, device: torch.device, seed: int) -> None:
        """Gives every parameter memory on `device`, as a view of its bucket, and this rank's share its initial values.

        Where parameters are shared out (stages 1 to 3) the other ranks' shares come with the first gather.
        """
        made: dict[int, nn.Parameter] = {}
        for bucket in self.buckets:
            self._allocate(bucket, device)
            for span in bucket.spans:
                for offset, values in self.pieces(bucket, span, bucket.masters):
                    initialise(values, span.layout, offset, seed)
            if bucket.piece is not bucket.masters:
                bucket.piece.copy_(bucket.masters)
            for entry, start in zip(bucket.entries, bucket.starts, strict=True):
                shape = tuple(entry.parameter.shape)
                empty = torch.empty(0, dtype=self.policy.compute, device=device)
                parameter = made[id(entry.parameter)] = nn.Parameter(empty)
                self.place[id(parameter)] = (bucket, start, shape)
        made |= {alias: made[id(owner)] for alias, owner in self._aliases.items()}
        self._rebind(made)
        for bucket in self.buckets:
            self.show(bucket)
        for kept in self.kept:
            tensor = torch.empty_like(kept.tensor, device=device)
            initialise(tensor, kept.layout, kept.layout.box(self.mesh, self.rank)[0], seed)
            setattr(kept.module, kept.attribute, tensor)

    def _find_kept(self) -> Iterator[Kept]:
        for stage, roots in self._roots.items():
            for module in dict.fromkeys(m for root in roots for m in root.modules()):
                if isinstance(module, Module):
                    yield from (Kept(layout, stage, module, name) for name, layout in module.kept.items())

    def _allocate(self, bucket: Bucket, device: torch.device) -> None:
        policy, stage, size = self.policy, self.sharding.stage, bucket.hi - bucket.lo
        if stage < 3:
            bucket.weights = torch.zeros(bucket.numel, dtype=policy.compute, device=device)
            bucket.piece = bucket.weights[bucket.lo : bucket.hi]
        else:
            bucket.piece = torch.zeros(size, dtype=policy.compute, device=device)
        same = policy.master == policy.compute
        bucket.masters = bucket.piece if same else torch.zeros(size, dtype=policy.master, device=device)
        if stage < 2:
            bucket.accumulator = torch.zeros(bucket.numel, dtype=policy.accumulate, device=device)
        bucket.gradients = (
            torch.zeros(size, dtype=policy.accumulate, device=device)
            if bucket.accumulator is None
            else bucket.accumulator[bucket.lo : bucket.hi]
        )

    def _rebind(self, made: Mapping[int, nn.Parameter]) -> None:
        """Puts the real parameters where the meta ones were, in every module that uses them (ties: in several).

        A module that is several units, or is in several, is there once.
        """
        for module in dict.fromkeys(m for roots in self._roots.values() for root in roots for m in root.modules()):
            if isinstance(module, Module):
                module.replace({name: made[id(p)] for name, p in module.named_parameters(recurse=False)})
        for bucket in self.buckets:
            bucket.entries = [replace(entry, parameter=made[id(entry.parameter)]) for entry in bucket.entries]

    def show(self, bucket: Bucket) -> None:
        """Lets modules see what the bucket's weights are now: views of them, or nothing while it is not gathered."""
        for entry in bucket.entries:
            _, start, shape = self.place[id(entry.parameter)]
            if bucket.weights is None:
                entry.parameter.data = entry.parameter.data.new_empty(0)
            else:
                entry.parameter.data = bucket.weights[start : start + prod(shape)].view(shape)

    # ---- what is whose --------------------------------------------------------------------------------------------

    def pieces(
        self, bucket: Bucket, span: Span, flat: torch.Tensor, begin: int = 0
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """(global offset, values) of this rank's elements of a span, as boxes of the logical tensor: no padding, views.

        flat    a buffer of the bucket's shard, or of a part of it that holds all of the span's elements in the shard
        begin   the shard's element that is the buffer's first
        """
        for held in self._boxes_of(bucket, span):
            start = held.start - begin
            values = flat[start : start + prod(held.memory)].view(held.memory)
            for dim, size in enumerate(held.shape):
                values = values.narrow(dim, 0, size)
            yield held.offset, values

    def _boxes_of(self, bucket: Bucket, span: Span) -> tuple[Held, ...]:
        """What of a span this rank holds: found once, for training waits while a checkpoint lists its boxes."""
        key = (bucket, span.start, span.stop)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = tuple(bucket.held(span, self.mesh, self.rank))
        return found

    def copies_of(self, bucket: Bucket) -> Group:
        """The ranks over pp that hold copies of a bucket: of its tie, or of its stage."""
        return self._copies_of(bucket.tie or bucket.stage)

    def replicas_of(self, bucket: Bucket) -> tuple[str, ...]:
        """Leaf axes of the batch over which the bucket's shards have copies."""
        return tuple(axis for axis in bucket.axes if axis not in bucket.shard_axes)

    def counts(self, bucket: Bucket, span: Span) -> bool:
        """Whether this rank is the one that counts its elements of the span in the norm and saves them."""
        owner = span.layout.is_owner(self.mesh, self.rank, bucket.shard_axes)
        return owner and self.copies_of(bucket).index == 0

    def counts_kept(self, kept: Kept) -> bool:
        """Whether this rank is the one that saves its part of the buffer."""
        return kept.layout.is_owner(self.mesh, self.rank) and self._copies_of(kept.stage).index == 0

    def ties(self) -> list[Tie]:
        """Ties of the parameters on this rank."""
        spans = (span for bucket in self.buckets for span in bucket.spans)
        return list(dict.fromkeys(span.layout.tie for span in spans if span.layout.tie))
