"""Copies of a parameter are bitwise equal on all ranks that hold them, or training must not go on.

Cheap enough to run every hundred steps: two 64-bit hashes per logical parameter, compared over each group of axes that
holds copies. What differs is named.
"""

from __future__ import annotations

import torch

from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.parallel.buckets import Bucket, Span
from ultrascale.parallel.layout import BATCH_AXES
from ultrascale.parallel.store import Store

_PRIME = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's odd word, as int64


class ReplicaError(Exception):
    """Copies of a parameter are not equal; the text says which, and over which axes."""


def hash_of(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [2]: a plain and a position-weighted sum of the tensor's bits, modulo 2⁶⁴."""
    words = tensor.contiguous().view(torch.uint8 if tensor.element_size() < 4 else torch.int32)
    words = words.flatten().to(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64) * _PRIME
    return torch.stack([words.sum(), (words * (weights | 1)).sum()])


def check_replicas(store: Store) -> None:
    """Compares the masters of all copies, over batch axes, tensor axes and stages; collective.

    Raises ReplicaError on every rank of the world when any group holds copies that differ.
    """
    mesh = store.mesh
    batch = set(mesh.expand(BATCH_AXES))
    by_axes: dict[tuple[str, ...], list[tuple[Bucket, Span]]] = {}
    over_stages: dict[Group, list[tuple[Bucket, Span]]] = {}
    for bucket in sorted(store.buckets, key=lambda bucket: bucket.tie or ""):  # ties last, as in Gradients.finish
        for span in bucket.spans:
            replicas = span.layout.replica_axes(mesh)
            over_batch = tuple(axis for axis in replicas if axis in batch and axis not in bucket.shard_axes)
            over_tensor = tuple(axis for axis in replicas if axis not in batch)
            for axes in (over_batch, over_tensor):
                if mesh.size(axes) > 1:
                    by_axes.setdefault(axes, []).append((bucket, span))
            if (copies := store.copies_of(bucket)).size > 1:
                over_stages.setdefault(copies, []).append((bucket, span))
    # Two sets of axes may be one group (one KV head: kv_replica is all of tp), and both parts are compared.
    groups: dict[Group, list[tuple[Bucket, Span]]] = {}
    for group, held in (
        *((store.group_of(axes), held) for axes, held in by_axes.items()),
        *over_stages.items(),
    ):
        groups.setdefault(group, []).extend(held)
    differing: list[str] = []
    for group, held in groups.items():
        hashes = torch.stack([hash_of(bucket.masters[slice(*bucket.shard(span))]) for bucket, span in held])
        with group.ledger.during("check"):
            rows = collectives.all_gather(hashes.unsqueeze(0), group).wait()
        for number, (_, span) in enumerate(held):
            if not bool((rows[:, number] == rows[0, number]).all()):
                differing.append(f"{span.layout.name} differs over {', '.join(group.axes)} (ranks {group.ranks})")
    # Every rank must come to the same end: one that saw nothing would wait for the others for ever.
    world = store.group_of(mesh.order)
    with world.ledger.during("check"):
        told = dict.fromkeys(text for texts in collectives.gather_json(differing, world) for text in texts)
    if told:
        raise ReplicaError("copies of parameters are not equal: " + "; ".join([*told][:8]))
