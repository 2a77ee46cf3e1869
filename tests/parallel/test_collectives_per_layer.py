"""Through the ledger: which collectives a layer, the embedding and the head make, when they are issued, how large.

Per transformer layer and micro-batch (DESIGN §6): 2 all-reduces forward and 2 backward; under sequence parallelism
2 all-gathers and 2 reduce-scatters forward, the same backward, and 2 more all-gathers of the saved inputs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pool import Context, pool
from small import assembled, config_of, step_batch_of, tokens
from ultrascale.comm.ledger import Row
from ultrascale.config.schema import Config

SP, NO_SP = {"parallel.sequence_parallel": True}, {"parallel.sequence_parallel": False}
SIZE = {"batch.global_size": 2, "batch.micro_size": 2}


def _rows(context: Context, config: Config) -> list[Row]:
    """The ledger of one step's forward, backward and reductions."""
    assembly = assembled(config, context)
    batch = step_batch_of(assembly, *tokens(config))
    assembly.engine.run(batch)
    context.ledger.mark("end of backward")
    assembly.gradients.finish()
    return context.ledger.rows


def rows_of(config: Config) -> list[list[Row]]:
    return pool(config.parallel.tp * (config.parallel.dp or 1)).run(_rows, config)


def count(rows: list[Row], phase: str, floor: int = 0) -> Counter[tuple[str, int]]:
    """(op, bytes) → calls over tp in a phase; `floor` leaves out smaller messages."""
    return Counter(
        (row.op, row.bytes)
        for row in rows
        if row.axes == ("tp",) and row.phase == phase and row.bytes >= floor and row.op != "mark"
    )


def per_layer(overrides: dict[str, Any]) -> dict[str, Counter[tuple[str, int]]]:
    """What a fourth layer adds to a model of three, by phase; equal on all ranks."""
    tp = overrides["parallel.tp"]
    short = rows_of(config_of({**SIZE, **overrides, "model.num_hidden_layers": 3}, tp))
    long = rows_of(config_of({**SIZE, **overrides, "model.num_hidden_layers": 4}, tp))
    added = []
    for fewer, more in zip(short, long, strict=True):
        phases = {row.phase for row in more if row.op != "mark"} - {"reduce"}
        difference = {phase: count(more, phase) for phase in phases}
        for phase in phases:
            difference[phase].subtract(count(fewer, phase))
        added.append({phase: +counts | -counts for phase, counts in difference.items()})
    assert all(rank == added[0] for rank in added)
    return added[0]


def activation(tp: int) -> int:
    """Bytes of one [seq, batch, hidden] tensor that a ring sends in one trip: (N − 1) / N of it."""
    return 8 * 2 * 16 * 8 * (tp - 1) // tp


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_makes_two_all_reduces_each_way(tp: int, recompute: str) -> None:
    """Selective recompute repeats no matrix, so it repeats no collective either."""
    whole = ("all_reduce", 2 * activation(tp))
    added = per_layer({**NO_SP, "parallel.tp": tp, "recompute.mode": recompute})
    assert added == {"forward": {whole: 2}, "backward": {whole: 2}}


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_sequence_parallel_layer_gathers_and_scatters(tp: int, recompute: str) -> None:
    gather, scatter = ("all_gather", activation(tp)), ("reduce_scatter", activation(tp))
    added = per_layer({**SP, "parallel.tp": tp, "recompute.mode": recompute})
    assert added == {"forward": {gather: 2, scatter: 2}, "backward": {gather: 4, scatter: 2}}


def test_full_recompute_repeats_a_layers_forward_collectives() -> None:
    whole, gather, scatter = ("all_reduce", 2 * activation(2)), ("all_gather", activation(2)), ("reduce_scatter", 1024)
    assert scatter[1] == activation(2)
    added = per_layer({**NO_SP, "parallel.tp": 2, "recompute.mode": "full"})
    assert added == {"forward": {whole: 2}, "backward": {whole: 4}}
    added = per_layer({**SP, "parallel.tp": 2, "recompute.mode": "full"})
    assert added == {"forward": {gather: 2, scatter: 2}, "backward": {gather: 6, scatter: 4}}


def _ends(overrides: dict[str, Any]) -> dict[str, Counter[tuple[str, int]]]:
    """What embedding and head make: a model's rows less those of its layers."""
    config = config_of({**SIZE, **overrides, "parallel.tp": 2, "model.num_hidden_layers": 1}, 2)
    layer = per_layer({**overrides, "parallel.tp": 2})
    ends = []
    for rows in rows_of(config):
        found = {phase: count(rows, phase) for phase in ("forward", "backward")}
        for phase, counts in found.items():
            counts.subtract(layer[phase])
        ends.append({phase: +counts for phase, counts in found.items()})
    assert all(rank == ends[0] for rank in ends)
    return ends[0]


@pytest.mark.parametrize(("smoothing", "sums"), [(0.0, 2), (0.1, 3)])
def test_embedding_and_head_make_one_each_way_and_two_small_ones(smoothing: float, sums: int) -> None:
    token = 8 * 2 * 8  # bytes of one float64 per token, which a ring of two sends once
    largest, parts = ("all_reduce", token), ("all_reduce", sums * token)
    whole, gather, scatter = ("all_reduce", 2 * activation(2)), ("all_gather", activation(2)), ("reduce_scatter", 1024)
    settings = {"model.label_smoothing": smoothing}
    assert _ends({**NO_SP, **settings}) == {
        "forward": {whole: 1, largest: 1, parts: 1},  # embedding; maximum; exp-sum and the target's logit
        "backward": {whole: 1},  # the head's input gradient
    }
    assert _ends({**SP, **settings}) == {
        "forward": {scatter: 1, gather: 1, largest: 1, parts: 1},
        # The head gathers its input again and scatters its gradient; the embedding gathers the gradient of its output.
        "backward": {gather: 2, scatter: 1},
    }


@pytest.mark.parametrize("mode", [SP, NO_SP], ids=["sp", "no sp"])
def test_the_input_gradient_is_on_its_way_before_the_weight_gradient(mode: dict[str, Any]) -> None:
    config = config_of({**SIZE, **mode, "parallel.tp": 2, "model.num_hidden_layers": 2}, 2)
    reduction = "reduce_scatter" if mode is SP else "all_reduce"
    for rows in rows_of(config):
        assert [row.sequence for row in rows] == sorted({row.sequence for row in rows})
        backward = [row for row in rows if row.phase == "backward"]
        marks = [i for i, row in enumerate(backward) if row.note.startswith("weight_gradient")]
        names = [backward[i].note.removeprefix("weight_gradient ") for i in marks]
        order = ("mlp.down_proj", "mlp.gate_proj", "attention.o_proj", "attention.q_proj")
        assert names == [f"layers.{layer}.{part}.weight" for layer in (1, 0) for part in order]
        for before, at, name in zip([-1, *marks], marks, names, strict=False):
            between = [row.op for row in backward[before + 1 : at]]
            if "down" in name or "o_proj" in name:  # its input gradient needs no sum
                # (what the head did in backward stands before the first layer's)
                assert before < 0 or between == (["all_gather"] if mode is SP else [])
            else:
                # Its own input gradient's reduction is the last call before its weight gradient's GEMM.
                assert between == (["all_gather", reduction] if mode is SP else [reduction])


BUCKETS = {**SIZE, "batch.micro_size": 1, "parallel.bucket_bytes": 1, "model.num_hidden_layers": 3}


def _parameters(config: Config) -> int:
    return sum(bucket.numel for bucket in assembled(config).gradients.buckets)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dp", [2, 4])
def test_all_buckets_but_the_last_are_issued_before_backward_ends(dp: int, deterministic: bool) -> None:
    """And then only one message of each: nothing is reduced twice."""
    settings = {**BUCKETS, "batch.global_size": 8, "parallel.deterministic_reduction": deterministic}
    config = config_of({**settings, "parallel.dp": dp}, dp)
    for rows in rows_of(config):
        end = next(i for i, row in enumerate(rows) if row.note == "end of backward")
        # Of a deterministic sum the first half is what is issued when a bucket is full.
        first_half = "all_to_all" if deterministic else "all_reduce"
        reduce = [i for i, row in enumerate(rows) if row.phase == "reduce" and i < end]
        issued = [i for i in reduce if rows[i].op == first_half]
        last_layer = max(i for i, row in enumerate(rows) if row.op == "mark" and row.phase == "backward")
        first_layer_of_last_micro_batch = [
            i for i, row in enumerate(rows) if row.note == "weight_gradient layers.2.mlp.down_proj.weight"
        ][-1]
        assert len(issued) == 5  # head, three layers, embedding
        # The first layer's and the embedding's are full when the last GEMM is done; the others while GEMMs go on.
        assert sum(i < last_layer for i in issued) == 3
        assert sum(i < first_layer_of_last_micro_batch for i in issued) == 1
        # The second halves of those that are two buckets old are issued too, for their memory.
        assert [rows[i].op for i in reduce if i not in issued] == (["all_gather"] * 3 if deterministic else [])
        assert all(rows[i].phase == "backward" for i in range(issued[0], end) if i not in reduce)


@pytest.mark.parametrize("dp", [2, 4])
def test_data_parallel_traffic_is_twice_the_gradients_times_n_minus_1_over_n(dp: int) -> None:
    for deterministic in (True, False):
        settings = {**BUCKETS, "batch.global_size": 8, "parallel.deterministic_reduction": deterministic}
        config = config_of({**settings, "parallel.dp": dp}, dp)
        gradient_bytes = _parameters(config_of(settings)) * 8
        for rows in rows_of(config):
            sent = sum(row.bytes for row in rows if row.axes == ("dp",))
            assert sent == 2 * gradient_bytes * (dp - 1) // dp, deterministic


@pytest.mark.parametrize("deterministic", [True, False])
def test_every_message_of_a_reduction_stands_under_reduce(deterministic: bool) -> None:
    """Or ledger.json gives half of the gradients' traffic to no phase."""
    settings = {**BUCKETS, "parallel.dp": 2, "parallel.deterministic_reduction": deterministic}
    for rows in rows_of(config_of(settings, 2)):
        assert {row.phase for row in rows if row.axes == ("dp",)} == {"reduce"}
