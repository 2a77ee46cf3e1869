"""The run-time check of copies sees one wrong bit wherever it is: in masters, a rank's own weights, gathered ones.

`tests/trainer/test_trainer_replicas.py` has masters over all axes, and a whole job; here are weights under ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from pool import Context, pool
from small import assembled, config_of, step_batch_of, tokens
from ultrascale.parallel import replicas
from ultrascale.parallel.buckets import Bucket, Span
from ultrascale.parallel.replicas import ReplicaError, check_replicas, hash_of
from ultrascale.step import train_step

Z = "parallel.zero_stage"


def _places(bucket: Bucket, span: Span, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(what it is, flat memory of the span) of this rank's copies in the compute dtype."""
    start, stop = bucket.shard(span)
    if bucket.piece is not bucket.masters and start < stop:
        yield "own weights", bucket.piece[start:stop]
    if bucket.weights is not None and stage in (1, 2):
        for kind, first, last in (("before", span.start, bucket.lo), ("behind", bucket.hi, span.stop)):
            if (first := max(first, span.start)) < (last := min(last, span.stop)):
                yield f"gathered weights {kind} its own", bucket.weights[first:last]


def _said(check: Callable[[], None]) -> str:
    try:
        check()
    except ReplicaError as error:
        return str(error)
    return ""


def one_bit_at_a_time(context: Context, overrides: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(parameter, what of it strayed on the last rank, what all said), after a step whose gathers are on their way."""
    config = config_of(
        {"precision.compute": "bfloat16", "parallel.dp": context.world_size, **overrides}, context.world_size
    )
    assembly = assembled(config, context)
    weights, store = assembly.optimizer.weights, assembly.store
    train_step(assembly, step_batch_of(assembly, *tokens(config)), 1)
    check_replicas(weights)
    places = [
        (span.layout.name, kind, memory)
        for bucket in store.buckets
        for span in bucket.spans
        for kind, memory in _places(bucket, span, store.sharding.stage)
    ]
    last = context.rank == context.world_size - 1
    found = []
    for number in range(60):  # all ranks check as often, whatever they hold
        strays = last and number < len(places)
        value = places[number][2][-1:] if strays else torch.empty(1, dtype=torch.bfloat16)
        before = value.clone()
        if strays:
            value.view(torch.int16).bitwise_xor_(1)
        said = _said(lambda: check_replicas(weights))
        value.copy_(before)
        if strays:
            found.append((*places[number][:2], said))
    assert not last or len(places) <= 60
    check_replicas(weights)
    return found


@pytest.mark.parametrize(
    ("world", "overrides", "kinds"),
    [
        (2, {Z: 0}, {"own weights"}),
        (2, {Z: 1}, {"own weights", "gathered weights before its own"}),
        (2, {Z: 2}, {"own weights", "gathered weights before its own"}),
        (2, {Z: 3}, {"own weights"}),
        (4, {Z: 1, "parallel.dp_shard": 2}, {"own weights", "gathered weights before its own"}),
    ],
    ids=str,
)
def test_weights_that_stray_by_one_bit_are_named(world: int, overrides: dict[str, Any], kinds: set[str]) -> None:
    found = pool(world).run(one_bit_at_a_time, overrides)[-1]
    assert {kind for _, kind, _ in found} == kinds
    for name, kind, said in found:
        assert name in said, f"{kind} of {name}: {said or 'nothing was said'}"
        assert ("not the masters" in said) == (kind == "own weights")


def gathered_float32(context: Context, stage: int) -> str:
    """What is said of a gathered weight that strays where weights are masters."""
    assembly = assembled(config_of({"precision.compute": "float32", "parallel.dp": 2, Z: stage}, 2), context)
    weights = assembly.optimizer.weights
    check_replicas(weights)
    bucket = assembly.store.buckets[0]
    assert bucket.weights is not None
    if context.rank == 0:
        bucket.weights[bucket.hi] += 1  # the other rank's
    return _said(lambda: check_replicas(weights))


@pytest.mark.parametrize("stage", [1, 2])
def test_gathered_weights_are_compared_where_they_are_masters_too(stage: int) -> None:
    for said in pool(2).run(gathered_float32, stage):
        assert "differs over dp" in said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_hash_sees_every_bit_and_every_place_and_does_not_depend_on_pieces(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = hash_of(values)
    swapped = values.clone()
    swapped[[3, 700]] = values[[700, 3]]
    hashes = [expected, hash_of(swapped), hash_of(values[:-1]), hash_of(-values)]
    for place in (0, 511, 999):
        flipped = values.clone()
        flipped[place : place + 1].view(torch.int16)[:1].bitwise_xor_(1)
        hashes.append(hash_of(flipped))
    assert len({tuple(found.tolist()) for found in hashes}) == len(hashes)
    monkeypatch.setattr(replicas, "PIECE", 7)
    assert torch.equal(hash_of(values), expected)
    assert hash_of(values[:0]).tolist() == [0, 0]
