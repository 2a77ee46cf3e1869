"""Copies of a parameter are bitwise equal on all ranks that hold them, or training must not go on.

Masters are compared with the other copies of them. Weights, which forward and backward read, follow: each rank's part
is its masters in the compute dtype, and where a rank keeps the other parts too (ZeRO 1 and 2: as they were gathered) it
has what the rank whose part it is has.

Cheap enough to run every hundred steps: one pass over what a rank holds, and two 64-bit hashes per logical parameter
that are compared over each group of axes that holds copies. What differs is named.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.parallel.layout import BATCH_AXES, Layout
from ultrascale.parallel.store import Store
from ultrascale.parallel.weights import Weights

PIECE = 1 << 20
"""Elements that are looked at at a time: what a check needs beside them stays this small."""

_PRIME = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's odd word, as int64


class ReplicaError(Exception):
    """Copies of a parameter are not equal; the text says which, and over which axes."""


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [2]: a plain and a position-weighted sum of the tensor's bits, modulo 2⁶⁴."""
    words = _bits(tensor.contiguous().view(-1))
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(PIECE)):
        start, wide = number * PIECE, part.to(torch.int64)
        weights = torch.arange(start + 1, start + part.numel() + 1, device=words.device, dtype=torch.int64) * _PRIME
        total += torch.stack([wide.sum(), (wide * (weights | 1)).sum()])
    return total


_Held = list[tuple[torch.Tensor, Layout]]
"""What is compared over a group: flat copies of (a part of) a tensor, in an order that all members have."""


def check_replicas(weights: Weights) -> None:
    """Compares the copies of all parameters, over batch axes, tensor axes and stages; collective.

    Raises ReplicaError on every rank of the world when any group holds copies that differ, or any rank weights that are
    not its masters'.
    """
    store = weights.store
    weights.settle()
    groups: dict[Group, _Held] = {}
    # Two sets of axes may be one group (one KV head: kv_replica is all of tp), and both parts are compared.
    for group, held in (*_copies_of_masters(store), *_copies_of_weights(store), *_copies_of_kept(store)):
        groups.setdefault(group, []).extend(held)
    differing = _not_their_masters(store)
    for group, held in groups.items():
        hashes = torch.stack([hash_of(values) for values, _ in held])
        with group.ledger.during("check"):
            rows = collectives.all_gather(hashes.unsqueeze(0), group).wait()
        for number, (_, layout) in enumerate(held):
            if not bool((rows[:, number] == rows[0, number]).all()):
                differing.append(f"{layout.name} differs over {', '.join(group.axes)} (ranks {group.ranks})")
    # Every rank must come to the same end: one that saw nothing would wait for the others for ever.
    world = store.group_of(store.mesh.order)
    with world.ledger.during("check"):
        told = dict.fromkeys(text for texts in collectives.gather_json(differing, world) for text in texts)
    if told:
        raise ReplicaError("copies of parameters are not equal: " + "; ".join([*told][:8]))


def _copies_of_masters(store: Store) -> Iterator[tuple[Group, _Held]]:
    """This rank's masters, by the groups that hold copies of them."""
    mesh = store.mesh
    batch = set(mesh.expand(BATCH_AXES))
    by_axes: dict[tuple[str, ...], _Held] = {}
    over_stages: dict[Group, _Held] = {}
    for bucket in sorted(store.buckets, key=lambda bucket: bucket.tie or ""):  # ties last, as in Gradients.finish
        for span in bucket.spans:
            masters = bucket.masters[slice(*bucket.shard(span))]
            replicas = span.layout.replica_axes(mesh)
            over_batch = tuple(axis for axis in replicas if axis in batch and axis not in bucket.shard_axes)
            over_tensor = tuple(axis for axis in replicas if axis not in batch)
            for axes in (over_batch, over_tensor):
                if mesh.size(axes) > 1:
                    by_axes.setdefault(axes, []).append((masters, span.layout))
            if (copies := store.copies_of(bucket)).size > 1:
                over_stages.setdefault(copies, []).append((masters, span.layout))
    yield from ((store.group_of(axes), held) for axes, held in by_axes.items())
    yield from over_stages.items()


def _copies_of_kept(store: Store) -> Iterator[tuple[Group, _Held]]:
    """Buffers that are state of the run: equal on all ranks that have their layer."""
    mesh = store.mesh
    batch = mesh.expand(BATCH_AXES)
    for kept in store.kept:
        for axes in (batch, mesh.expand(["tp"])):
            if mesh.size(axes) > 1:
                yield store.group_of(axes), [(kept.tensor.flatten(), kept.layout)]


def _copies_of_weights(store: Store) -> Iterator[tuple[Group, _Held]]:
    """Weights that this rank keeps whole while it has masters of a part of them, by the groups of the parts."""
    for bucket in store.buckets:
        group = store.group_of(bucket.shard_axes)
        if group.size > 1 and store.sharding.stage < 3:
            assert bucket.weights is not None
            yield group, [(bucket.weights[span.start : span.stop], span.layout) for span in bucket.spans]


def _not_their_masters(store: Store) -> list[str]:
    """What is wrong with this rank's own part of the weights, where it is no view of the masters."""
    found = []
    for bucket in store.buckets:
        if bucket.piece is bucket.masters:
            continue
        for span in bucket.spans:
            own = slice(*bucket.shard(span))
            parts = zip(bucket.piece[own].split(PIECE), bucket.masters[own].split(PIECE), strict=True)
            # As bits: what is not a number is equal to itself.
            if not all(torch.equal(_bits(weights), _bits(masters.to(weights.dtype))) for weights, masters in parts):
                found.append(f"{span.layout.name}: weights are not the masters of rank {store.rank}, rounded")
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor's bits, as integers."""
    return tensor.view({1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32))
