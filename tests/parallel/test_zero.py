"""ZeRO: the same bits however it is cut and hidden, the traffic and the memory that theory allows."""

from __future__ import annotations

import gc
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pool import Context, pool
from small import Box, assembled, boxes, config_of, step_batch_of, tokens, whole
from ultrascale.assembly import Assembly
from ultrascale.config.schema import Config
from ultrascale.parallel.sharing import SHARED_FROM, Widths, copies_bytes, gathers, held_bytes, sent_bytes
from ultrascale.step import train_step

ADAM = {"optimizer.name": "adamw", "optimizer.lr": 0.01, "optimizer.weight_decay": 0.1, "optimizer.max_norm": 1.0}
FP32 = {"precision.compute": "float32", "model.tie_word_embeddings": True, **ADAM}
STEPS = 3


@dataclass
class Seen:
    """What one rank saw of a run."""

    weights: list[Box]
    norms: list[float]
    losses: list[float]
    traffic: Counter[tuple[str, str]]
    """(phase, op) → bytes of the last step."""
    by_axes: Counter[tuple[str, ...]]


def run(context: Context | None, config: Config, poisoned: bool = False) -> Seen:
    with pytest.MonkeyPatch.context() as patch:
        if poisoned:
            _poison(patch)
        assembly = assembled(config, context)
        ledger = assembly.groups.ledger
        norms, losses = [], []
        for step in range(1, STEPS + 1):
            ledger.clear()
            result = train_step(assembly, step_batch_of(assembly, *tokens(config, seed=step)), step)
            norms.append(result.grad_norm)
            losses.append(result.report["loss"])
    traffic: Counter[tuple[str, str]] = Counter()
    by_axes: Counter[tuple[str, ...]] = Counter()
    for row in ledger.rows:
        if row.phase in ("reduce", "gather"):
            traffic[row.phase, row.op] += row.bytes
            by_axes[row.axes] += row.bytes
    return Seen(boxes(assembly, "masters"), norms, losses, traffic, by_axes)


def _poison(patch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written yet holds NaN, so that whoever reads it is found out."""
    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty")):
        original = getattr(owner, name)

        def poisoned(*args: Any, original: Any = original, **kwargs: Any) -> torch.Tensor:
            made = original(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() and not made.is_meta else made

        patch.setattr(owner, name, poisoned)


def weights(world: int, overrides: dict[str, Any], poisoned: bool = False) -> dict[str, np.ndarray]:
    config = config_of({**FP32, "parallel.dp": world, "batch.global_size": 8, **overrides}, world)
    seen = pool(world).run(run, config, poisoned)
    assert all(rank.norms == seen[0].norms and rank.losses == seen[0].losses for rank in seen)
    found = whole([rank.weights for rank in seen])
    assert all(np.isfinite(values).all() for values in found.values())
    return found | {"norms": np.array(seen[0].norms), "losses": np.array(seen[0].losses)}


def bitwise(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    assert one.keys() == other.keys()
    return all(np.array_equal(values, other[name]) for name, values in one.items())


Z = "parallel.zero_stage"


@pytest.mark.parametrize("world", [2, 4])
def test_stages_0_and_1_have_the_same_bits_and_so_have_2_and_3(world: int) -> None:
    none, first, second, third = (weights(world, {Z: stage}) for stage in range(4))
    names = [name for name in none if name != "norms"]  # its sum over elements has another order
    assert all(np.array_equal(none[name], first[name]) for name in names)
    assert all(np.array_equal(second[name], third[name]) for name in names)
    np.testing.assert_allclose(first["norms"], none["norms"], rtol=1e-14)
    # Stages 2 and 3 sum over ranks before they sum over micro-batches: as many roundings of float32 as there are terms.
    terms = 8
    for name in names:
        scale = np.abs(none[name]).max()
        assert np.abs(second[name] - none[name]).max() <= STEPS * terms * 2.0**-23 * max(scale, 1.0), name
    assert not bitwise(none, second)


def test_with_one_micro_batch_all_stages_have_the_same_bits() -> None:
    none, *others = (weights(2, {Z: stage, "batch.micro_size": 4}) for stage in range(4))
    for other in others:
        assert all(np.array_equal(none[name], other[name]) for name in none if name != "norms")


VARIANTS: list[dict[str, Any]] = [
    {"parallel.overlap": False},
    {"parallel.prefetch": 0},
    {"parallel.prefetch": 5},
    {"parallel.keep_gathered": True},
    {"parallel.bucket_bytes": 1},
    {"recompute.mode": "full"},
]


@pytest.mark.parametrize("stage", [1, 3])
def test_overlap_prefetch_buckets_and_recompute_change_no_bit(stage: int) -> None:
    base = weights(2, {Z: stage})
    for variant in VARIANTS:
        if stage == 3 or not {"parallel.prefetch", "parallel.keep_gathered"} & variant.keys():
            found = weights(2, {Z: stage, **variant})
            names = [name for name in base if name != "norms"]
            assert all(np.array_equal(base[name], found[name]) for name in names), variant


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_reads_memory_that_nothing_wrote(stage: int) -> None:
    assert bitwise(weights(2, {Z: stage}, poisoned=True), weights(2, {Z: stage}))


# ---- traffic ------------------------------------------------------------------------------------------------------


def traffic(world: int, overrides: dict[str, Any]) -> tuple[Seen, int]:
    """What rank 0 sent in a step, and the elements of its buckets, padding included."""
    config = config_of({"parallel.dp": world, **ADAM, **overrides}, world)
    seen = pool(world).run(run, config)
    (elements,) = set(pool(world).run(_elements, config))
    assert all(rank.traffic == seen[0].traffic for rank in seen)
    return seen[0], elements


def _elements(context: Context, config: Config) -> int:
    return sum(bucket.numel for bucket in assembled(config, context).store.buckets)


@pytest.mark.parametrize(
    ("world", "micro_batches", "compute", "reduce"),
    [
        (2, 1, "float32", "float32"),
        (2, 4, "bfloat16", "float32"),
        (4, 1, "bfloat16", "bfloat16"),
        (4, 4, "float32", "float32"),
        (4, 4, "bfloat16", "bfloat16"),
    ],
)
def test_bytes_on_the_wire_are_the_formulas(world: int, micro_batches: int, compute: str, reduce: str) -> None:
    """2G, P + G, P + M·G and M·(2P + G), each times (N − 1)/N."""
    precision = {"precision.compute": compute, "precision.reduce": reduce}
    batch = {"batch.global_size": world * micro_batches, "batch.micro_size": 1}
    for stage in range(4):
        seen, elements = traffic(world, {**precision, **batch, Z: stage, "parallel.bucket_bytes": 4000})
        p = elements * (4 if compute == "float32" else 2)
        g = elements * (4 if precision["precision.reduce"] == "float32" else 2)
        assert sum(seen.traffic.values()) == sent_bytes(stage, p, g, micro_batches, world), f"stage {stage}"
        gathered = sum(n for (phase, _), n in seen.traffic.items() if phase == "gather")
        assert gathered == sent_bytes(stage, p, 0, micro_batches, world)


def test_the_formulas_are_those_of_the_design() -> None:
    """DESIGN §6."""
    p, g, n = 2_000, 4_000, 4
    for m in (1, 4):
        expected = [2 * g, p + g, p + m * g, m * (2 * p + g)]
        assert [sent_bytes(stage, p, g, m, n) * n // (n - 1) for stage in range(4)] == expected
        assert sent_bytes(3, p, g, m, n, kept=True) == sent_bytes(2, p, g, m, n)


def test_kept_weights_are_gathered_once_a_step() -> None:
    settings = {"precision.compute": "float32", "batch.global_size": 8, Z: 3}
    kept, elements = traffic(2, {**settings, "parallel.keep_gathered": True})
    dropped, _ = traffic(2, settings)
    p, m = 4 * elements, 4
    assert sum(kept.traffic.values()) == sent_bytes(3, p, p, m, 2, kept=True)
    saved = gathers(3, m) - gathers(3, m, kept=True)
    assert saved == 2 * m - 1
    assert sum(dropped.traffic.values()) - sum(kept.traffic.values()) == saved * p // 2


def test_recompute_gathers_nothing_twice() -> None:
    settings = {"precision.compute": "float32", Z: 3}
    assert traffic(2, settings)[0].traffic == traffic(2, {**settings, "recompute.mode": "full"})[0].traffic


def test_copies_of_shards_are_summed_once_a_step_on_their_own_axis() -> None:
    for micro_batches in (1, 2):
        batch = {"batch.global_size": 4 * micro_batches, "batch.micro_size": 1}
        seen, elements = traffic(4, {"precision.compute": "float32", Z: 3, "parallel.dp_shard": 2, **batch})
        p = 4 * elements
        assert seen.by_axes["dp_replicate",] == copies_bytes(p, shards=2, copies=2) == p // 2
        assert seen.by_axes["dp_shard",] == sent_bytes(3, p, p, micro_batches, 2)


# ---- memory -------------------------------------------------------------------------------------------------------

MODEL = {
    "model.hidden_size": 64,
    "model.num_hidden_layers": 6,
    "model.intermediate_size": 176,
    "model.vocab_size": 256,
    "batch.sequence_length": 2,
    "batch.global_size": 4,
    "parallel.deterministic_reduction": False,
    **ADAM,
}


def live_bytes() -> int:
    """Of all tensors that this program holds, each storage once.

    The least of some readings: when a call is over, a thread of gloo's lets go of its tensors a moment later.
    """
    readings = []
    for pause in (0.0, 0.001, 0.005, 0.02):
        time.sleep(pause)
        readings.append(_visible_bytes())
    return min(readings)


def _visible_bytes() -> int:
    """Of all tensors that Python sees; one that only C++ holds is seen too, if Python has ever held it."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass
class Memory:
    """Bytes over those before the model was built."""

    at_rest: int
    peak_of_weights: int
    peak_of_gradients: int
    """Over those at rest and the gathered weights, when a reduction has just been issued."""
    elements: int
    parameters: int
    largest_unit: int


def _memory(context: Context, config: Config) -> Memory:
    gc.collect()
    before = live_bytes()
    assembly = assembled(config, context)
    store, peak = assembly.store, 0
    weights_ = assembly.optimizer.weights
    enter = weights_.enter

    def watched(visit: Any) -> None:
        nonlocal peak
        enter(visit)
        peak = max(peak, sum(bucket.weights.nbytes for bucket in store.buckets if bucket.weights is not None)
                   + sum(flat.nbytes for _, flat in weights_._gathering.values()))  # fmt: skip

    weights_.enter = watched  # type: ignore[method-assign]
    gradients, peak_of_gradients = assembly.gradients, 0
    issue = gradients._issue

    def issued(bucket: Any) -> None:
        nonlocal peak_of_gradients
        issue(bucket)
        gathered = sum(flat.nbytes for _, flat in weights_._gathering.values())
        if config.parallel.zero_stage == 3:
            gathered += sum(b.weights.nbytes for b in store.buckets if b.weights is not None)
        if _visible_bytes() - gathered > peak_of_gradients:
            peak_of_gradients = max(peak_of_gradients, live_bytes() - gathered)

    gradients._issue = issued  # type: ignore[method-assign]
    for step in (1, 2):
        train_step(assembly, step_batch_of(assembly, *tokens(config)), step)
    gc.collect()
    return Memory(
        at_rest=_settled(assembly) - before,
        peak_of_weights=peak,
        peak_of_gradients=peak_of_gradients - _settled(assembly),
        elements=sum(bucket.numel for bucket in store.buckets),
        parameters=sum(span.layout.numel for bucket in store.buckets for span in bucket.spans),
        largest_unit=max(bucket.numel for bucket in store.buckets),
    )


def _settled(assembly: Assembly) -> int:
    """Once the gathers of the step are awaited."""
    for bucket in assembly.store.buckets:
        assembly.optimizer.weights._wait(bucket)
    return live_bytes()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_bytes_at_rest_are_the_formulas(world: int, compute: str) -> None:
    """Bytes per parameter: weights 2, masters 4, moments 8, gradients 4 (summed up in float32); float32 has no masters
    of its own, its weights are they."""
    widths = Widths(compute=2 if compute == "bfloat16" else 4, wide=4, moments=8)
    for stage in range(4):
        config = config_of({**MODEL, "precision.compute": compute, "parallel.dp": world, Z: stage}, world)
        for memory in pool(world).run(_memory, config):
            p, n = memory.elements, world
            expected = sum(held_bytes(stage, item, p, n, widths) for item in SHARED_FROM)
            if compute == "bfloat16":
                assert expected == [18 * p, 6 * p + 12 * p / n, 2 * p + 16 * p / n, 18 * p / n][stage]
            else:
                assert expected == [16 * p, 8 * p + 8 * p / n, 4 * p + 12 * p / n, 16 * p / n][stage]
            assert memory.at_rest == pytest.approx(expected, rel=0.01), f"stage {stage}"
            assert memory.elements == pytest.approx(memory.parameters, rel=0.01)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_weights_gathered_at_once_are_prefetch_and_one_units(prefetch: int) -> None:
    config = config_of(
        {**MODEL, "precision.compute": "float32", "parallel.dp": 2, Z: 3, "parallel.prefetch": prefetch}, 2
    )
    for memory in pool(2).run(_memory, config):
        assert 0 < memory.peak_of_weights <= (prefetch + 1) * 4 * memory.largest_unit
        assert memory.peak_of_weights > prefetch * 4 * memory.largest_unit


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_under_way_are_a_units_and_what_the_transport_holds(stage: int) -> None:
    """A unit's gradients are on their way when the next one's are made; gloo holds the pieces that come in beside."""
    config = config_of({**MODEL, "precision.compute": "float32", "parallel.dp": 2, Z: stage}, 2)
    for memory in pool(2).run(_memory, config):
        unit = 4 * memory.largest_unit
        activations = 100_000
        assert unit < memory.peak_of_gradients <= 2 * unit + activations
