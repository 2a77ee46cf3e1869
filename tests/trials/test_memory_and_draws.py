"""What went wrong with random draws (values that depend on the layout, ranks that share a stream by luck) and with memory
(copies that a second tie, accumulation or a buffer kept).

Nothing is drawn in training: initial values are a function of seed, name and index, samples of seed and number, and there
is no dropout in this version. So there is no stream to keep alike, and tests hold that none is touched.

Held elsewhere:

| report | where |
|---|---|
| BL-123 recomputation draws other masks | nothing is drawn; `tests/parallel/test_zero.py`, `test_pipelines.py`: recomputation changes no bit |
| BL-130 loader workers share a seed | samples come from (seed, number) alone: `tests/data/test_data_loader.py`, `test_data_builtin.py` |
| BL-142 a whole model per rank on loading | `tests/parallel/test_gemms.py`: building a shard makes no tensor larger than it; `test_ties_depths_and_rates.py`: a tie is one tensor; `tests/checkpoint/test_checkpoint_reshard.py`: a rank reads its boxes alone; `tests/checkpoint/test_hugging_face.py`: of a Hugging Face folder its own bytes, a tied head once |
| BL-146 nobody knows whether it fits | `ultrascale plan` is not in this version; what it will count with is `parallel/sharing.py`, compared with live tensors in `tests/parallel/test_zero.py` and below |
"""  # noqa: E501

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from trial_cases import TINY, Outcome, copies_are_equal, on_this_rank, steps, text

from pool import Context, pool
from small import assembled, boxes, config_of, step_batch_of, whole
from ultrascale.data.loader import Data
from ultrascale.parallel.sharing import SHARED_FROM, Widths, held_bytes
from ultrascale.step import evaluate, train_step, with_denominators

Z = "parallel.zero_stage"
SHORT: dict[str, Any] = {"batch.sequence_length": 16, "batch.micro_size": 1}
BATCHES = [text([16, 3, 0, 11, 16, 1, 8, 14], length=16, seed=n) for n in range(2)]

# ---- draws ------------------------------------------------------------------------------------------------------

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel.dp": 2, Z: 3}),
    (2, {"parallel.tp": 2}),
    (2, {"parallel.pp": 2}),
    (2, {"parallel.pp": 2, "pipeline.schedule": "zb_v"}),
    (4, {"parallel.pp": 4}),
    (4, {"parallel.tp": 2, "parallel.pp": 2}),
    (4, {"parallel.tp": 4, "parallel.sequence_parallel": False}),  # two KV heads, each on two ranks
    (4, {"parallel.dp": 2, "parallel.tp": 2, Z: 1}),
    (4, {"parallel.dp": 4, "parallel.dp_shard": 2, Z: 3}),
]


def first_weights(context: Context | None, overrides: Mapping[str, Any]) -> Outcome:
    config = config_of({**TINY, **overrides}, context.world_size if context else 1)
    return Outcome(weights=boxes(assembled(config, context), "masters"))


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_a_model_starts_with_the_same_bits_under_every_layout(world: int, layout: dict[str, Any]) -> None:
    """BL-126, BL-128, BL-129: and copies on several ranks with each other's."""
    expected = whole([first_weights(None, {}).weights])
    found = pool(world).run(first_weights, layout)
    copies_are_equal(found, "weights")
    values = whole([outcome.weights for outcome in found])
    assert values.keys() == expected.keys()
    assert all(np.array_equal(values[name], array) for name, array in expected.items())
    matrices = [array.tobytes() for name, array in values.items() if "norm" not in name]
    assert len(set(matrices)) == len(matrices), "two matrices start alike, of two stages perhaps"


@pytest.mark.parametrize("stage", [1, 3])
def test_copies_of_shards_stay_equal(stage: int) -> None:
    """BL-129: shard × replicate, two by two."""
    layout = {"parallel.dp": 4, "parallel.dp_shard": 2, Z: stage, "optimizer.name": "adamw", "optimizer.lr": 0.01}
    assert copies_are_equal(steps(4, {**SHORT, **layout}, BATCHES), "weights") >= 4 * 9 + 3


Streams = tuple[bytes, Any, tuple[Any, ...]]


def streams() -> Streams:
    """States of the streams that a program draws from by default."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (name, keys.tobytes(), *rest)


def drawn_from(context: Context, overrides: Mapping[str, Any]) -> list[str]:
    """What of a run changed a default stream."""
    changed, before = [], streams()

    def look(what: str) -> None:
        nonlocal before
        now = streams()
        if now != before:
            changed.append(what)
        before = now

    config = config_of({**TINY, **SHORT, "data.train": "builtin:uneven", **overrides}, context.world_size)
    assembly = assembled(config, context)
    look("building")
    for number in (1, 2):
        Data(config).batch(number, 0, 1, config.batch.micro_size)
        look("reading")
        batch = with_denominators(assembly, step_batch_of(assembly, *BATCHES[0]).micro_batches)
        train_step(assembly, batch, number)
        look("training")
        evaluate(assembly, [batch])
        look("evaluating")
    torch.rand(1)
    look("nothing is seen")
    return changed


@pytest.mark.parametrize("mode", [*(pytest.param(m, marks=pytest.mark.prove) for m in ("none", "selective")), "full"])
def test_a_run_draws_from_no_stream_that_ranks_could_share(mode: str) -> None:
    """BL-124, and BL-123 as long as there is no dropout."""
    for layout in ({"parallel.tp": 2}, {"parallel.dp": 2, Z: 3, "optimizer.name": "muon"}):
        found = pool(2).run(drawn_from, {**layout, "recompute.mode": mode})
        assert found == [["nothing is seen"]] * 2


def seeded_otherwise(context: Context, seed: int) -> list[Any]:
    torch.manual_seed(seed + 100 * context.rank)
    random.seed(seed)
    outcome = on_this_rank(context, {**SHORT, "parallel.tp": 2, "recompute.mode": "full"}, BATCHES)
    return [outcome.losses, [values.tobytes() for *_, values in outcome.weights]]


@pytest.mark.prove
def test_the_state_of_default_streams_changes_no_bit() -> None:
    """BL-124."""
    assert pool(2).run(seeded_otherwise, 1) == pool(2).run(seeded_otherwise, 2)


# ---- memory -----------------------------------------------------------------------------------------------------

TIED: dict[str, Any] = {
    **SHORT,
    "model.tie_word_embeddings": True,
    "model.vocab_size": 1024,
    "precision.compute": "bfloat16",
}
VOCABULARY, BLOCK_MATRICES, NORMS = 1024 * 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128, 2 * 64
Found = dict[tuple[str, int], dict[str, int]]


def bytes_of_every_stage(context: Context, layout: Mapping[str, Any], cases: Sequence[tuple[str, int]]) -> Found:
    """(optimizer, stage) → bytes that this rank holds after a step, by what they are for."""
    found: Found = {}
    for optimizer, stage in cases:
        overrides = {**TINY, **TIED, **layout, "optimizer.name": optimizer, Z: stage}
        assembly = assembled(config_of(overrides, context.world_size), context)
        train_step(assembly, step_batch_of(assembly, *BATCHES[0]), 1)
        assembly.optimizer.weights.settle()
        tensors: dict[str, list[torch.Tensor]] = {
            "weights": [b.piece if b.weights is None else b.weights for b in assembly.store.buckets],
            "masters": [b.masters for b in assembly.store.buckets],
            "gradients": [
                b.gradients if b.accumulator is None else b.accumulator for b in assembly.store.buckets
            ],
            "moments": [tensor for state in assembly.optimizer.state for tensor in state.values()],
        }  # fmt: skip
        found[optimizer, stage] = {item: _storages(held) for item, held in tensors.items()}
    return found


def _storages(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the memory behind views, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel.pp": 2, "parallel.dp": 2},
        *(pytest.param(layout, marks=pytest.mark.prove) for layout in ({"parallel.dp": 2}, {"parallel.pp": 4})),
    ],
    ids=str,
)
def test_a_tie_on_two_stages_is_held_once_on_each_and_shared_out_like_the_rest(layout: dict[str, Any]) -> None:
    """BL-143: every kind of memory, for a parameter with two moments (AdamW) or one (Muon's matrices)."""
    cases = [(optimizer, stage) for optimizer in ("adamw", "muon") for stage in range(4)]
    pp, dp = layout.get("parallel.pp", 1), layout.get("parallel.dp", 1)
    ranks = pool(pp * dp).run(bytes_of_every_stage, layout, cases)
    for rank, found in enumerate(ranks):
        stage_of_rank = rank // dp
        blocks, ends = 4 // pp, {0, pp - 1}
        others = (VOCABULARY if stage_of_rank in ends else 0) + blocks * NORMS + (64 if stage_of_rank == pp - 1 else 0)
        for (optimizer, stage), held in found.items():
            for item in SHARED_FROM:
                matrices = Widths(compute=2, wide=4, moments=8 if optimizer == "adamw" else 4)
                expected = held_bytes(stage, item, blocks * BLOCK_MATRICES, dp, matrices)
                expected += held_bytes(stage, item, others, dp, Widths(compute=2, wide=4, moments=8))
                assert held[item] == pytest.approx(expected, rel=0.01), f"rank {rank}, {optimizer}, {stage}: {item}"


def gradients_in_the_making(context: Context, overrides: Mapping[str, Any]) -> tuple[int, int]:
    """(most bytes of gradients that were not passed on yet, those of the largest unit)."""
    assembly = assembled(config_of({**TINY, **SHORT, "parallel.dp": 2, **overrides}, 2), context)
    gradients, most = assembly.gradients, 0
    issue = gradients._issue

    def watched(bucket: Any) -> None:
        nonlocal most
        most = max(most, sum(b.accumulator.nbytes for b in gradients.buckets if b.accumulator is not None))
        issue(bucket)

    gradients._issue = watched  # type: ignore[method-assign]
    kept = [16] * assembly.config.batch.global_size
    train_step(assembly, step_batch_of(assembly, *text(kept, length=16)), 1)
    return most, max(bucket.numel * bucket.gradients.element_size() for bucket in gradients.buckets)


@pytest.mark.parametrize("policy", [{Z: 2}, {Z: 3}, {Z: 3, "parallel.keep_gathered": True}], ids=str)
def test_accumulation_holds_no_more_gradients_than_one_micro_batch(policy: dict[str, Any]) -> None:
    """BL-192: there is a shard and one unit, however many micro-batches a step has."""
    for micro_batches in (1, 4):
        for most, unit in pool(2).run(gradients_in_the_making, {**policy, "batch.global_size": 2 * micro_batches}):
            assert most == unit
