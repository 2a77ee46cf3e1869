"""Where and in what format moments are held: what is computed, what is rounded, what comes back; and that neither
pieces nor shards change a bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from small import assembled, box_of, config_of
from ultrascale.assembly import Assembly
from ultrascale.checkpoint.state import state_boxes
from ultrascale.optim import segments as segments_module
from ultrascale.optim.adamw import AdamW
from ultrascale.optim.groups import Rule
from ultrascale.optim.offload import SLOTS, Offloaded, Resident
from ultrascale.optim.optimizer import Optimizer
from ultrascale.optim.segments import Segment
from ultrascale.parallel.buckets import Bucket

ADAMW = {
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.1,
    "optimizer.betas": (0.8, 0.95),
    "optimizer.eps": 1e-6,
    "precision.compute": "float32",
}
MIXED = {
    **ADAMW,
    "optimizer.name": "muon",
    "optimizer.groups": ({"match": "layers.0.mlp.*", "optimizer": "sgd", "momentum": 0.5},),
}


def draw_gradients(assembly: Assembly, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for bucket in assembly.store.buckets:
        for span in bucket.spans:
            gradient = box_of(assembly.store, bucket, span, bucket.gradients)
            gradient.copy_(torch.randn(gradient.shape, generator=generator))


def steps(assembly: Assembly, count: int = 3) -> list[torch.Tensor]:
    """Masters after some steps."""
    for step in range(1, count + 1):
        draw_gradients(assembly, step)
        assembly.optimizer.step(step, 0.01 * step, 0.5)
    return [bucket.masters for bucket in assembly.store.buckets]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- format ---------------------------------------------------------------------------------------------------------


def test_bfloat16_moments_are_float32s_rounded_to_nearest_after_each_step() -> None:
    assembly = assembled(config_of({**ADAMW, "optimizer.state_dtype": "bfloat16"}))
    bucket = assembly.store.buckets[0]
    span = bucket.spans[0]
    assert span.layout.decay
    master = box_of(assembly.store, bucket, span, bucket.masters)
    weight, mean, square = master.clone(), torch.zeros_like(master), torch.zeros_like(master)
    for step in range(1, 5):
        draw_gradients(assembly, step)
        gradient = box_of(assembly.store, bucket, span, bucket.gradients) * 0.5
        assembly.optimizer.step(step, 0.01, 0.5)
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        denominator = (square / (1 - 0.95**step)).sqrt() + 1e-6
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * mean / (1 - 0.8**step) / denominator
        mean, square = mean.bfloat16().float(), square.bfloat16().float()
        torch.testing.assert_close(master, weight, rtol=1e-5, atol=1e-7)
        for name, _, values in assembly.optimizer.state_pieces(bucket, span):
            assert values.dtype == torch.bfloat16
            # Sums that end within a float32's rounding of the middle may be rounded to either side.
            off = values.float() != {"exp_avg": mean, "exp_avg_sq": square}[name]
            assert off.float().mean() < 0.01


@pytest.mark.parametrize("overrides", [ADAMW, MIXED], ids=["adamw", "mixed"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_checkpoints_hold_moments_as_they_are_held(overrides: dict[str, Any], dtype: str | None) -> None:
    config = config_of({**overrides, "optimizer.state_dtype": dtype})
    assembly = assembled(config)
    steps(assembly)
    boxes = list(state_boxes(assembly.optimizer, owned=True))
    moments = [box for box in boxes if box.name.startswith("optimizer.")]
    masters = [box for box in boxes if not box.name.startswith("optimizer.")]
    assert {box.tensor.dtype for box in masters} == {torch.float32}
    assert {box.tensor.dtype for box in moments} == {torch.bfloat16 if dtype == "bfloat16" else torch.float32}
    assert len({box.name for box in boxes}) == len(boxes)
    assert all((box.tensor != 0).any() for box in moments)


def test_float32_is_what_null_means_where_masters_are_float32() -> None:
    plain, said = (assembled(config_of({**MIXED, "optimizer.state_dtype": dtype})) for dtype in (None, "float32"))
    assert same(steps(plain), steps(said))


# ---- host memory ----------------------------------------------------------------------------------------------------


class Watched(Offloaded):
    """Writes down what is copied when."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[str, int]] = []

    def _fetch(self, segments: Any, number: int) -> torch.Tensor:
        if number < len(segments):
            self.seen.append(("fetch", number))
        return super()._fetch(segments, number)

    def _give_back(self, segment: Segment, block: torch.Tensor, slot: int) -> None:
        self.seen.append(("give back", slot))
        super()._give_back(segment, block, slot)


def offloaded(overrides: dict[str, Any], device: str = "cpu") -> tuple[Assembly, Watched]:
    """An assembly whose moments go to host memory and back, as they would beside a GPU."""
    assembly = assembled(config_of(overrides))
    optimizer = assembly.optimizer
    memory = Watched(optimizer.memory.dtype, torch.device(device))
    other = Optimizer(optimizer.weights, optimizer.algorithms, optimizer.segments, memory)
    object.__setattr__(assembly, "optimizer", other)
    return assembly, memory


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_moments_in_host_memory_change_no_bit(dtype: str | None) -> None:
    settings = {**MIXED, "optimizer.state_dtype": dtype}
    resident = assembled(config_of(settings))
    away, _ = offloaded(settings)
    assert len(away.optimizer.segments) > SLOTS
    assert same(steps(resident), steps(away))
    for here, there in zip(resident.optimizer.state, away.optimizer.state, strict=True):
        assert here.keys() == there.keys()
        assert same(list(here.values()), list(there.values()))


def test_a_segment_comes_before_its_turn_and_no_slot_is_taken_while_it_is_in_use() -> None:
    away, memory = offloaded(MIXED)
    steps(away, 1)
    count = len(away.optimizer.segments)
    place = {what: number for number, what in enumerate(memory.seen)}
    order = [what for what, _ in memory.seen]
    assert order.count("fetch") == order.count("give back") == count
    given = [number for number, what in enumerate(memory.seen) if what[0] == "give back"]
    for number in range(1, count):
        assert place["fetch", number] < given[number - 1], "not fetched while the one before it was updated"
    for number in range(SLOTS, count):
        assert place["fetch", number] > given[number - SLOTS], "fetched into a slot that was in use"


def test_on_the_device_are_slots_of_the_largest_segment_alone() -> None:
    away, memory = offloaded(MIXED)
    steps(away, 1)
    largest = max(sum(t.numel() for t in segment.state.values()) for segment in away.optimizer.segments)
    assert [slot.numel() for slot in memory._slots] == [largest] * SLOTS


def test_on_a_cpu_offload_is_the_plain_thing() -> None:
    assembly = assembled(config_of({**MIXED, "optimizer.offload": True}))
    assert type(assembly.optimizer.memory) is Resident


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_streams_change_no_bit() -> None:
    device = torch.device("cuda")
    found = []
    for kind in (Resident, Offloaded):
        bucket = flat_bucket(1 << 20, device)
        cuts = [0, 1 << 18, 1 << 19, 3 << 18, 1 << 20]
        segments = [Segment(bucket, start, stop, RULE) for start, stop in pairwise(cuts)]
        memory = kind(torch.float32, device)
        for segment in segments:
            memory.hold(segment, AdamW().state_names(segment))
        for step in range(1, 6):
            for segment, state in memory.visit(segments):
                AdamW().update(segment, state, step, 0.01, 0.5)
        memory.settle()
        found.append([bucket.masters, *(t.cpu() for s in segments for t in s.state.values())])
    assert same(*found)


# ---- pieces and shards ----------------------------------------------------------------------------------------------

RULE = Rule("adamw", 1.0, 0.1, betas=(0.9, 0.95), eps=1e-8)


def flat_bucket(numel: int, device: torch.device | str = "cpu", seed: int = 1) -> Bucket:
    """A bucket of nothing but flat memory."""
    generator = torch.Generator().manual_seed(seed)
    bucket = Bucket(0, (), (), None, [], ())
    bucket.numel = bucket.hi = numel
    bucket.masters = torch.randn(numel, generator=generator).to(device)
    bucket.gradients = torch.randn(numel, generator=generator).to(device)
    return bucket


def updated(cuts: list[int], numel: int, seed: int = 1) -> torch.Tensor:
    """Masters after three steps of AdamW on the segments between these cuts, each with a state of its own."""
    bucket, algorithm = flat_bucket(numel, seed=seed), AdamW()
    segments = [Segment(bucket, start, stop, RULE) for start, stop in pairwise(cuts)]
    for segment in segments:
        Resident(torch.float32, torch.device("cpu")).hold(segment, algorithm.state_names(segment))
    for step in range(1, 4):
        for segment in segments:
            algorithm.update(segment, segment.state, step, 0.01, 0.7)
    return bucket.masters


@pytest.mark.parametrize("first", [0, 64, 40, 1], ids="begins at {}".format)
@pytest.mark.parametrize("shard", [64, 192, 448], ids="cut at {}".format)
def test_where_shards_cut_flat_memory_changes_no_bit(first: int, shard: int) -> None:
    """Vector kernels finish a piece with plain code that rounds otherwise; which elements those are must not move."""
    numel = 1000
    cuts = [first, *(place for place in range(shard, numel, shard) if place > first), numel]
    for seed in range(50):  # of some hundred elements with another rounding a few differ
        assert torch.equal(updated([first, numel], numel, seed), updated(cuts, numel, seed))


@pytest.mark.parametrize("size", [64, 256])
def test_pieces_change_no_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = updated([40, 1000], 1000)
    monkeypatch.setitem(segments_module.PIECE, "cpu", size)
    assert torch.equal(whole, updated([40, 1000], 1000))
