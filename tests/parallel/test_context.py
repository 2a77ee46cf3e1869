"""Context parallelism on real ranks: what is sent, what is kept, what one document can change of another."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from pool import Context, pool
from small import assembled, boxes, config_of, whole
from ultrascale.comm import p2p
from ultrascale.config.schema import Config
from ultrascale.data.loader import Data, MicroArrays
from ultrascale.mesh.axes import ulysses_size
from ultrascale.parallel.context import ring
from ultrascale.parallel.context.split import Cut, order, rank_runs
from ultrascale.parallel.context.traffic import Shape, sent
from ultrascale.parallel.passes import Pass
from ultrascale.precision.policy import DTYPES, wide
from ultrascale.step import step_batch, train_step

METHODS = ["ring", "allgather", "ulysses", "hybrid"]
SIZE = {"batch.sequence_length": 32, "batch.global_size": 4, "batch.micro_size": 2}
EIGHT_HEADS = {"model.num_attention_heads": 8, "model.num_key_value_heads": 2, "model.head_dim": 6}


def cut_over(cp: int, method: str, **more: Any) -> dict[str, Any]:
    hybrid = {"context.ulysses_size": 2} if method == "hybrid" and cp > 2 else {}
    return {"parallel.cp": cp, "context.method": method, **hybrid, **more}


# ---- traffic ------------------------------------------------------------------------------------------------------


def _sent(context: Context, config: Config) -> tuple[int, int, Counter[str]]:
    """Bytes of attention over cp in a forward alone and in a step's forward and backward; calls of the latter."""
    assembly = assembled(config, context)
    batch = step_batch(assembly, Data(config).batch(1, 0, 1, config.batch.micro_size))
    ledger, found = assembly.groups.ledger, []
    for run in (assembly.evaluation.run, assembly.engine.run):
        ledger.clear()
        run(batch)
        found.append([row for row in ledger.rows if row.phase == "attention"])
    forward, both = (sum(row.bytes for row in rows) for rows in found)
    assembly.gradients.finish()
    return forward, both, Counter(row.op for row in found[1])


def expected(config: Config, recomputed: bool = False) -> tuple[int, int]:
    """(forward, step) of all layers and micro-batches."""
    model, batch = config.model, config.batch
    assert model.num_key_value_heads is not None
    assert model.head_dim is not None
    dtype = DTYPES[config.precision.compute]
    shape = Shape(
        tokens=batch.sequence_length * batch.micro_size // config.parallel.cp,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        value_dim=model.head_dim,
        bytes=dtype.itemsize,
        wide_bytes=wide(dtype).itemsize,
    )
    ulysses = ulysses_size(config)
    forward, backward = sent(shape, config.parallel.cp // ulysses, ulysses)
    times = model.num_hidden_layers * batch.global_size // batch.micro_size
    return times * forward, times * (forward * (2 if recomputed else 1) + backward)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_bytes_sent_are_the_formula(method: str, compute: str) -> None:
    for cp in (2, 4):
        config = config_of({**SIZE, **EIGHT_HEADS, **cut_over(cp, method), "precision.compute": compute}, cp)
        found = pool(cp).run(_sent, config)
        assert {rank[:2] for rank in found} == {expected(config)}


def test_calls_of_each_method() -> None:
    layers_and_micro_batches = 4
    calls = {
        "ring": {"send": 3 + 3 + 3, "receive": 9},
        "allgather": {"all_gather": 2, "reduce_scatter": 1},
        "ulysses": {"all_to_all": 4},
        "hybrid": {"all_to_all": 4, "send": 3, "receive": 3},
    }
    for method, per_layer in calls.items():
        config = config_of({**SIZE, **EIGHT_HEADS, **cut_over(4, method)}, 4)
        for _, _, found in pool(4).run(_sent, config):
            assert found == {op: layers_and_micro_batches * count for op, count in per_layer.items()}


def test_recomputed_blocks_send_their_forward_again() -> None:
    for mode in ("selective", "full"):
        config = config_of({**SIZE, **cut_over(2, "ring"), "recompute.mode": mode}, 2)
        for forward, both, _ in pool(2).run(_sent, config):
            assert (forward, both) == expected(config, recomputed=True)


def test_a_window_keeps_far_blocks_at_home() -> None:
    whole_row, window = (
        pool(4).run(_sent, config_of({**SIZE, **cut_over(4, "ring"), "context.split": "contiguous", **more}, 4))
        for more in ({}, {"model.sliding_window": 8})
    )
    assert sum(rank[1] for rank in window) * 2 == sum(rank[1] for rank in whole_row)  # 3 hops instead of 3 + 2 + 1
    assert window[3][:2] == (0, window[2][1] // 3)  # the last one's keys are its own affair; it sends a gradient home


def _order_of_calls(context: Context, config: Config) -> tuple[list[str], list[str]]:
    """Calls and computations of attention in one forward, and in one backward."""
    assembly = assembled(config, context)
    batch = step_batch(assembly, Data(config).batch(1, 0, 1, config.batch.micro_size))
    (stage,) = assembly.stages.values()
    backend, ledger = stage.build.attention.meeting.backend, assembly.groups.ledger  # type: ignore[attr-defined]

    def marked(name: str, original: Callable[..., Any], *args: Any) -> Any:
        ledger.mark(name)
        return original(*args)

    for name in ("forward", "backward"):
        setattr(backend, name, partial(marked, f"attention {name}", getattr(backend, name)))
    ledger.clear()
    assembly.engine.run(batch)
    assembly.gradients.finish()
    rows = [
        row.note.removeprefix("attention ") if row.op == "mark" else row.op
        for row in ledger.rows
        if row.note.startswith("attention ") or row.phase == "attention"
    ]
    last = len(rows) - rows[::-1].index("forward")
    return rows[:last], rows[last:]


def test_the_next_block_is_on_its_way_while_one_is_computed() -> None:
    one_layer = {"model.num_hidden_layers": 1, "batch.global_size": 1, "batch.micro_size": 1}
    config = config_of({**SIZE, **cut_over(4, "ring"), **one_layer}, 4)
    passed_on = ["send", "receive"]
    for forward, backward in pool(4).run(_order_of_calls, config):
        assert forward == [*passed_on, "forward"] * 3 + ["forward"]
        # Gradients follow their blocks one step behind; the sum of its own block comes from the last place.
        assert backward == [
            *passed_on, "backward", *passed_on, "backward", "send", "receive",
            *passed_on, "backward", "send", "receive", "backward", "send", "receive",
        ]  # fmt: skip


def _with_order_alone(context: Context, config: Config) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring.Ring, "_call", lambda self: 0)
        return _trained(context, config, poisoned=False)


@pytest.mark.parametrize("cp", [2, 4])
def test_messages_need_no_tags(cp: int) -> None:
    """NCCL goes by order alone: with one tag for all messages of all calls, gloo does too."""
    config = config_of({**SIZE, **cut_over(cp, "ring")}, cp)
    tagged, alone = (whole(pool(cp).run(function, config, *more)) for function, more in (
        (_trained, (False,)), (_with_order_alone, ()),
    ))  # fmt: skip
    assert all(np.array_equal(values, alone[name]) for name, values in tagged.items())


BLOCKS = 4
"""Of others: two with keys and values, and of two the gradients."""


def _most_blocks(context: Context, config: Config) -> int:
    """Blocks of other ranks that are held at once, while attention is computed."""
    held: list[weakref.ref[torch.Tensor]] = []
    most = 0
    original = p2p.batch

    def batch(messages: Sequence[p2p.Message], group: Any) -> list[Any]:
        nonlocal most
        held.extend(weakref.ref(message.tensor) for message in messages if not message.sends)
        pending = original(messages, group)
        deadline = time.monotonic() + 2.0
        while (here := sum(ref() is not None for ref in held)) > BLOCKS and time.monotonic() < deadline:
            time.sleep(0.001)  # a thread of the transport lets go of a finished call a moment later
        most = max(most, here)
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "batch", batch)
        _trained(context, config, poisoned=False)
    return most


def test_no_rank_holds_more_than_two_blocks_of_others_and_their_gradients() -> None:
    config = config_of({**SIZE, **cut_over(4, "ring")}, 4)
    assert all(2 <= most <= BLOCKS for most in pool(4).run(_most_blocks, config))


def test_the_models_window_is_what_documents_are_balanced_by() -> None:
    assert Cut.of(config_of({"model.sliding_window": 5, "parallel.cp": 2}, 2)).window == 5


# ---- documents ----------------------------------------------------------------------------------------------------

DOCUMENTS = ((0, 5, 6, 20), (0, 13))


def _logits(context: Context | None, config: Config, changed: bool) -> np.ndarray:
    """[seq / cp, batch, vocabulary] of sequences in which the second document may have other tokens."""
    assembly = assembled(config, context)
    arrays = Data(config).batch(1, 0, 1, config.batch.micro_size)[0]
    inputs = arrays.inputs.copy()
    if changed:
        for column, starts in enumerate(DOCUMENTS):
            second = slice(starts[1], [*starts, inputs.shape[0]][2])
            inputs[second, column] = (inputs[second, column] + 1) % config.model.vocab_size
    arrays = replace(arrays, inputs=inputs, documents=DOCUMENTS)
    batch = step_batch(assembly, [arrays]).micro_batches[0]
    (stage,) = assembly.stages.values()
    with torch.no_grad():
        out = stage(None, replace(batch, labels=()), Pass(0, 0, None))
    assert isinstance(out, dict)
    return out["logits"].numpy()


@pytest.mark.parametrize("method", ["one process", *METHODS])
def test_a_documents_tokens_change_no_bit_of_another_documents_logits(method: str) -> None:
    cp = 1 if method == "one process" else 2
    keys = {**SIZE, "data.document_mask": True, **(cut_over(cp, method) if cp > 1 else {})}
    config = config_of({**keys, "model.sliding_window": 9}, cp)
    before, after = (
        pool(cp).run(_logits, config, changed) if cp > 1 else [_logits(None, config, changed)]
        for changed in (False, True)
    )
    length = config.batch.sequence_length
    for rank in range(cp):
        for column, starts in enumerate(DOCUMENTS):
            places = order(rank_runs(length, starts, Cut.of(config))[rank])
            within = (places >= starts[1]) & (places < [*starts, length][2])
            same = (before[rank][:, column] == after[rank][:, column]).all(axis=-1)
            assert same[~within].all()
            assert not same[within].any()


# ---- memory and memory that nobody wrote ---------------------------------------------------------------------------


def _kept(context: Context | None, config: Config) -> int:
    """Bytes of tokens' activations that autograd keeps for one micro-batch, each storage once."""
    assembly = assembled(config, context)
    batch = step_batch(assembly, Data(config).batch(1, 0, 1, config.batch.micro_size)).micro_batches[0]
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.dim():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    flats = [bucket.weights for bucket in assembly.store.buckets if bucket.weights is not None]
    parameters = {flat.untyped_storage().data_ptr() for flat in flats}
    (stage,) = assembly.stages.values()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = stage(None, batch, Pass(0, 0, assembly.gradients))
    assert isinstance(out, dict)
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


@pytest.mark.parametrize("method", METHODS)
def test_activations_fall_with_cp(method: str) -> None:
    size = {"batch.sequence_length": 256, "batch.global_size": 1, "batch.micro_size": 1, "model.num_key_value_heads": 4}
    alone = _kept(None, config_of(size))
    for cp in (2, 4):
        config = config_of({**size, **cut_over(cp, method)}, cp)
        # What Ulysses trades is kept on both sides of the trade: by head for attention, by token for what follows.
        output = config.model.num_hidden_layers * 256 // cp * config.model.hidden_size * 8
        twice = output if ulysses_size(config) > 1 else 0
        for kept in pool(cp).run(_kept, config):
            assert kept == pytest.approx(alone / cp + twice, rel=0.01)


def _trained(context: Context, config: Config, poisoned: bool) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        if poisoned:
            for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty")):
                patch.setattr(owner, name, _nan_filled(getattr(owner, name)))
        assembly = assembled(config, context)
        data = Data(config)
        for step in (1, 2):
            train_step(assembly, step_batch(assembly, data.batch(step, 0, 1, config.batch.micro_size)), step)
        return boxes(assembly, "masters")


def _nan_filled(original: Any) -> Any:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() and not made.is_meta else made

    return poisoned


@pytest.mark.parametrize("method", METHODS)
def test_nothing_reads_memory_that_nothing_wrote(method: str) -> None:
    config = config_of({**SIZE, **cut_over(4, method), "data.document_mask": True, "model.sliding_window": 11}, 4)
    clean, poisoned = (whole(pool(4).run(_trained, config, on)) for on in (False, True))
    assert all(np.array_equal(values, poisoned[name]) for name, values in clean.items())
    assert all(np.isfinite(values).all() for values in clean.values())


def test_padding_is_no_target_and_no_ones_context() -> None:
    config = config_of({**SIZE, **cut_over(4, "ring"), "batch.sequence_length": 27, "context.pad": True}, 4)
    for rank, (inputs, labels, positions, documents) in enumerate(pool(4).run(_padded, config)):
        assert documents == ((0, 27), (0, 27))
        places = order(rank_runs(32, (0, 27), Cut.of(config))[rank])
        arrays: MicroArrays = Data(config).batch(1, 0, 1, 2)[0]
        real = places < 27
        assert np.array_equal(inputs[real], arrays.inputs[places[real]])
        assert np.array_equal(positions[real], arrays.positions[places[real]])
        assert np.array_equal(labels[real], arrays.labels[places[real]])
        assert (labels[~real] == -100).all()
        assert prod(inputs.shape) == 32 * 2 // 4


def _padded(context: Context, config: Config) -> Any:
    assembly = assembled(config, context)
    batch = step_batch(assembly, Data(config).batch(1, 0, 1, 2)).micro_batches[0]
    return batch.inputs.numpy(), batch.labels[0].numpy(), batch.positions.numpy(), batch.documents
