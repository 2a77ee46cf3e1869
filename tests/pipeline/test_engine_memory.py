"""What the engine keeps: nothing after a step, and during 1F1B no more activations than the schedule says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pool import Context, pool
from small import assembled, config_of, step_batch_of, tokens
from ultrascale.assembly import Assembly
from ultrascale.config.schema import Config
from ultrascale.pipeline.actions import Action, Kind
from ultrascale.pipeline.engine import Engine


class Storages(TorchDispatchMode):
    """Every storage that is made under it, without keeping any alive: autograd's saved tensors have no Python object,
    so that neither gc nor weak references to tensors would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in given:
                    self.made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self) -> list[int]:
        """Bytes of those that still live."""
        self.made = {key: value for key, value in self.made.items() if not value[0].expired()}
        return [size for _, size in self.made.values()]

    def left(self) -> list[int]:
        """Those that stay: gloo's threads drop what they worked on a moment after they have said that it is done."""
        deadline = time.monotonic() + 1.0
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.alive()


@contextmanager
def sampled(engine: Engine, storages: Storages, held: list[int], alive: list[int]) -> Iterator[None]:
    """Notes, after every action, how many micro-batches the engine holds and how many bytes live."""
    execute = dict(engine._execute)

    def noting(action: Action) -> None:
        execute[action.kind](action)
        held.append(len(engine._in_flight))
        if action.kind in (Kind.F, Kind.B):
            alive.append(sum(storages.alive()))

    engine._execute = dict.fromkeys(execute, noting)
    try:
        yield
    finally:
        engine._execute = execute


def step(assembly: Assembly) -> dict[str, Any]:
    """One training step and one evaluation, watched."""
    config = assembly.config
    inputs, labels = tokens(config)
    batch = step_batch_of(assembly, inputs, labels)
    held: list[int] = []
    alive: list[int] = []
    storages = Storages()
    with storages, sampled(assembly.engine, storages, held, alive):
        outputs = assembly.engine.run(batch)
        during = max(alive)
        del outputs
        assembly.gradients.finish()
        left = storages.left()
        assembly.evaluation.run(batch)
    return {
        "held": max(held),
        "bytes": during,
        "left": left,
        "left by evaluation": storages.left(),
        "made": len(alive),
        "sent": max([0, *(len(engine._sent) for engine in (assembly.engine, assembly.evaluation))]),
    }


def _steps(context: Context, config: Config) -> list[dict[str, Any]]:
    assembly = assembled(config, context)
    return [step(assembly) for _ in range(2)]


def watched(overrides: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """What the ranks saw in their second step, after caches were filled."""
    config = config_of({"model.num_hidden_layers": 4, **overrides}, world)
    if world == 1:
        assembly = assembled(config)
        return [[step(assembly) for _ in range(2)][1]]
    return [steps[1] for steps in pool(world).run(_steps, config)]


LAYOUTS = [
    (1, {}),
    (1, {"recompute.mode": "full"}),
    (1, {"recompute.mode": "selective", "model.tie_word_embeddings": True}),
    (1, {"precision.compute": "bfloat16"}),
    (2, {"parallel.pp": 2, "pipeline.schedule": "1f1b"}),
    (2, {"parallel.pp": 2, "pipeline.schedule": "gpipe", "model.tie_word_embeddings": True}),
    (2, {"parallel.tp": 2}),
    (2, {"parallel.dp": 2, "parallel.bucket_bytes": 1}),
    (2, {"parallel.dp": 2, "precision.compute": "bfloat16", "precision.reduce": "bfloat16"}),
    (4, {"parallel.tp": 2, "parallel.pp": 2, "recompute.mode": "full"}),
    (4, {"parallel.pp": 4, "pipeline.layout": (2, 0, 0, 2)}),
]


@pytest.mark.parametrize(("world", "overrides"), LAYOUTS, ids=lambda value: str(value))
def test_no_activation_lives_after_a_step(world: int, overrides: dict[str, Any]) -> None:
    for rank, seen in enumerate(watched(overrides, world)):
        assert seen["made"] > 0
        assert seen["bytes"] > 0
        assert seen["left"] == [], f"rank {rank}"
        assert seen["left by evaluation"] == [], f"rank {rank}"
        assert seen["sent"] == 0


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 6), (4, 2), (4, 9)])
def test_1f1b_holds_no_more_micro_batches_than_stages_are_left(ranks: int, micro_batches: int) -> None:
    """min(M, P − r) on rank r, and exactly that many at its fullest moment."""
    overrides = {"parallel.pp": ranks, "pipeline.schedule": "1f1b", "batch.global_size": micro_batches}
    held = [seen["held"] for seen in watched(overrides, ranks)]
    assert held == [min(micro_batches, ranks - rank) for rank in range(ranks)]


def test_memory_of_1f1b_does_not_grow_with_micro_batches_and_that_of_gpipe_does() -> None:
    """In bytes that really live, messages included, and not by what the engine's own books say."""

    def peaks(schedule: str, micro_batches: int) -> list[int]:
        overrides = {"parallel.pp": 2, "pipeline.schedule": schedule, "batch.global_size": micro_batches}
        return [seen["bytes"] for seen in watched(overrides, 2)]

    few, many = peaks("1f1b", 4), peaks("1f1b", 16)
    one_message = 8 * 8 * 16  # seq · hidden · float64
    for before, after in zip(few, many, strict=True):
        assert after <= before + 2 * one_message + 16 * 64  # and the scalars that the last stage reports
    for before, after in zip(peaks("gpipe", 4), peaks("gpipe", 16), strict=True):
        assert after > 3 * before


def test_gradient_accumulation_holds_one_micro_batch() -> None:
    few, many = (watched({"batch.global_size": size}, 1)[0] for size in (2, 16))
    assert few["held"] == many["held"] == 1
    assert many["bytes"] <= few["bytes"] + 16 * 64


def _outputs_at_their_backward(context: Context, config: Config) -> list[bool]:
    """For each micro-batch whether the stage's output still lives when its backward begins."""
    assembly = assembled(config, context)
    engine = assembly.engine
    outputs: dict[int, StorageWeakRef] = {}
    alive: list[bool] = []
    hand_over, backward = engine._hand_over, engine._execute[Kind.B]

    def noting(payload: str, source: int, target: int, micro_batch: int, tensor: torch.Tensor) -> None:
        if payload == "activation":
            outputs[micro_batch] = StorageWeakRef(tensor.untyped_storage())
        hand_over(payload, source, target, micro_batch, tensor)

    def looking(action: Action) -> None:
        output = outputs[action.micro_batch]
        deadline = time.monotonic() + 0.2
        while not output.expired() and time.monotonic() < deadline:
            time.sleep(0.002)
        alive.append(not output.expired())
        backward(action)

    engine._hand_over = noting  # type: ignore[method-assign]
    if context.rank == 0:
        engine._execute[Kind.B] = looking
    engine.run(step_batch_of(assembly, *tokens(config)))
    return alive


def test_an_output_is_dropped_when_it_has_arrived_and_not_kept_for_backward() -> None:
    """With four stages the first gradient proves to the first stage that three of its messages were used."""
    overrides = {"parallel.pp": 4, "pipeline.schedule": "1f1b", "batch.global_size": 6, "model.num_hidden_layers": 4}
    alive = pool(4).run(_outputs_at_their_backward, config_of(overrides, 4))[0]
    assert len(alive) == 6
    assert not any(alive[1:])


def test_a_graph_that_is_kept_would_be_seen() -> None:
    assembly = assembled(config_of({"model.num_hidden_layers": 1}))
    kept: list[Any] = []
    backward = assembly.engine._backward

    def keeping(action: Action) -> None:
        kept.append(assembly.engine._in_flight[action.stage, action.micro_batch])
        backward(action)

    batch = step_batch_of(assembly, *tokens(assembly.config))
    for keep in (False, True):
        if keep:
            assembly.engine._execute[Kind.B] = keeping
        with Storages() as storages:
            assembly.engine.run(batch)
            assembly.gradients.finish()
        assert bool(storages.alive()) == keep
