"""What went wrong in others' pipelines: reductions that fire too early or never, labels of another micro-batch,
evaluation that disturbs training, orders that hang, and runs that are resumed under another schedule."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trial_cases import TINY, Outcome, Tokens, compare, copies_are_equal, steps, text

from pool import THREADS, Context, pool
from small import assembled, config_of, step_batch_of
from ultrascale.assembly import Assembly
from ultrascale.models.batch import MicroBatch, StepBatch
from ultrascale.pipeline.actions import Kind
from ultrascale.pipeline.program import program
from ultrascale.pipeline.schedules.registry import SCHEDULES
from ultrascale.step import evaluate, train_step, with_denominators

SHORT: dict[str, Any] = {"batch.sequence_length": 16, "batch.micro_size": 1}
UNEVEN = [16, 3, 0, 11, 16, 1, 8, 14]
TWO: dict[str, Any] = {"parallel.pp": 2}
ALL = [entry.name for entry in SCHEDULES if entry.training]
SOME = ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe"]
"""One of each kind: whole backwards, several stages a rank, late weight gradients, the same on a V, two copies."""


def batches(count: int, kept: Sequence[int] = UNEVEN) -> list[Tokens]:
    return [text(kept, length=16, seed=n) for n in range(count)]


def bits(outcomes: Sequence[Outcome]) -> list[Any]:
    """Losses, norms and weights of all ranks, to be compared bit for bit."""
    return [
        (o.losses, o.norms, [(name, offset, values.tobytes()) for name, _, offset, values in o.weights])
        for o in outcomes
    ]


# ---- reductions -----------------------------------------------------------------------------------------------------


def replicas(schedule: str, tied: bool) -> None:
    settings = {**SHORT, "model.tie_word_embeddings": tied}
    found = steps(4, {**settings, **TWO, "parallel.dp": 2, "pipeline.schedule": schedule}, batches(2))
    assert copies_are_equal(found, "weights") >= 4 * 9
    compare(steps(1, settings, batches(2)), found)


@pytest.mark.parametrize(("schedule", "tied"), [(name, number % 2 == 0) for number, name in enumerate(SOME)])
def test_replicas_of_a_pipeline_have_the_same_bits_and_the_gradients_of_one_process(schedule: str, tied: bool) -> None:
    """Embedding and head too, whose weight gradients come last of all."""
    replicas(schedule, tied)


@pytest.mark.prove
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ALL)
def test_replicas_of_every_pipeline_have_the_gradients_of_one_process(schedule: str, tied: bool) -> None:
    replicas(schedule, tied)


def reductions(context: Context, overrides: Mapping[str, Any], tokens: Tokens) -> list[tuple[str, int]]:
    """(operation, bytes) of what one step sums over replicas, in order."""
    assembly = assembled(config_of({**TINY, **overrides}, context.world_size), context)
    train_step(assembly, with_denominators(assembly, step_batch_of(assembly, *tokens).micro_batches), 1)
    return [(row.op, row.bytes) for row in context.ledger.rows if row.phase == "reduce"]


def reduced_once(schedule: str) -> None:
    """Micro-batches fewer than stages, as many, and more: the last backward stands at another place each time."""
    seen = []
    for number in (1, 2, 3, 5):
        size = {"batch.global_size": 2 * number}
        tokens = batches(1, (UNEVEN * 2)[: 2 * number])
        layout = {**SHORT, **size, **TWO, "parallel.dp": 2, "pipeline.schedule": schedule}
        compare(steps(1, {**SHORT, **size}, tokens), steps(4, layout, tokens))
        seen.append(pool(4).run(reductions, layout, tokens[0]))
    for rank in range(4):
        assert seen[0][rank]
        assert all(run[rank] == seen[0][rank] for run in seen), f"rank {rank}"


def test_gradients_are_reduced_once_a_step_whatever_the_number_of_micro_batches() -> None:
    reduced_once("zb_h1")


@pytest.mark.prove
@pytest.mark.parametrize("schedule", [name for name in ALL if not name.startswith("dualpipe")])
def test_gradients_are_reduced_once_a_step_under_every_schedule(schedule: str) -> None:
    reduced_once(schedule)


# ---- recomputation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe"])
def test_recomputation_changes_no_bit_of_a_pipeline(schedule: str) -> None:
    settings = {**SHORT, **TWO, "pipeline.schedule": schedule, "precision.compute": "float32"}
    plain, *others = (steps(2, {**settings, "recompute.mode": m}, batches(2)) for m in ("none", "selective", "full"))
    for other in others:
        assert bits(other) == bits(plain)


@pytest.mark.prove
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", ALL)
def test_twenty_steps_of_every_pipeline_have_the_curve_of_one_process(schedule: str, optimizer: str) -> None:
    """Whether or not it recomputes, and whether or not sums over replicas are taken in rank order."""
    settings = {**SHORT, "optimizer.name": optimizer, "optimizer.lr": 0.01}
    expected = steps(1, settings, batches(20))
    for mode, deterministic in (("none", True), ("selective", False), ("full", True)):
        layout = {**TWO, "parallel.dp": 2, "pipeline.schedule": schedule, "recompute.mode": mode}
        found = steps(4, {**settings, **layout, "parallel.deterministic_reduction": deterministic}, batches(20))
        for outcome in found:
            np.testing.assert_allclose(outcome.losses, expected[0].losses, rtol=1e-7)
            np.testing.assert_allclose(outcome.norms, expected[0].norms, rtol=1e-7)


# ---- labels, evaluation ---------------------------------------------------------------------------------------------


def per_micro_batch(context: Context | None, overrides: Mapping[str, Any], tokens: Sequence[Tokens]) -> list[float]:
    """The loss sum of every single micro-batch of this rank's last stage: trained and evaluated in turn."""
    assembly = assembled(config_of({**TINY, **overrides}, context.world_size if context else 1), context)
    sums: list[float] = []
    for engine in (assembly.engine, assembly.evaluation):
        engine.run = kept(engine.run, sums)  # type: ignore[method-assign, assignment]
    for number, own in enumerate(tokens, 1):
        batch = with_denominators(assembly, step_batch_of(assembly, *own).micro_batches)
        evaluate(assembly, [batch])
        train_step(assembly, batch, number)
    return sums


def kept(run: Callable[[StepBatch], Any], sums: list[float]) -> Callable[[StepBatch], Any]:
    def running(batch: StepBatch) -> Any:
        outputs = run(batch)
        sums.extend(float(output["lm"]) for output in outputs)
        return outputs

    return running


@pytest.mark.parametrize("schedule", [*SOME, "looped_bfs", "interleaved_1f1b_a2a_overlap"])
def test_each_micro_batch_meets_its_own_labels_with_evaluation_in_between(schedule: str) -> None:
    """Labels follow from the micro-batch's tokens; a rank that took those of another would lose other sums."""
    tokens = [(inputs, (inputs * 7 + 3) % 256) for inputs, _ in batches(3)]
    expected = per_micro_batch(None, SHORT, tokens)
    assert len(set(expected)) > 2 * 8
    found = pool(2).run(per_micro_batch, {**SHORT, **TWO, "pipeline.schedule": schedule}, tokens)
    np.testing.assert_allclose(sorted(chain.from_iterable(found)), sorted(expected), rtol=1e-12)


def with_evaluations(context: Context | None, overrides: Mapping[str, Any], tokens: Sequence[Tokens]) -> Any:
    """Evaluations before, between and after two steps, of wider micro-batches than those of training."""
    assembly = assembled(config_of({**TINY, **overrides}, context.world_size if context else 1), context)
    losses = [evaluate(assembly, [wide(assembly, tokens[2])])]
    reports = []
    for number in (1, 2):
        batch = with_denominators(assembly, step_batch_of(assembly, *tokens[number - 1]).micro_batches)
        reports.append(train_step(assembly, batch, number).report["loss"])
        losses.append(evaluate(assembly, [wide(assembly, tokens[2])]))
    return losses, reports


def wide(assembly: Assembly, tokens: Tokens) -> StepBatch:
    """As many micro-batches as in training, of three sequences each."""
    micro_batches = [
        MicroBatch(m.inputs.repeat(1, 3), tuple(labels.repeat(1, 3) for labels in m.labels), m.positions.repeat(1, 3))
        for m in step_batch_of(assembly, *tokens).micro_batches
    ]
    return with_denominators(assembly, micro_batches)


@pytest.mark.parametrize("schedule", SOME)
def test_evaluation_may_come_before_the_first_step_and_in_other_sizes(schedule: str) -> None:
    layout = {**SHORT, **TWO, "pipeline.schedule": schedule}
    losses, reports = with_evaluations(None, SHORT, batches(3))
    undisturbed = steps(2, layout, batches(2))
    for rank, (found, trained) in enumerate(pool(2).run(with_evaluations, layout, batches(3))):
        np.testing.assert_allclose(found, losses, rtol=1e-12)
        assert trained == undisturbed[rank].losses
        np.testing.assert_allclose(trained, reports, rtol=1e-12)
    assert len(set(losses)) == 3


# ---- deadlocks ------------------------------------------------------------------------------------------------------


def programs(pps: Sequence[int], degrees: Sequence[int], numbers: Sequence[int]) -> int:
    """Builds every plan of these sizes, which proves that it cannot hang; returns how many there were."""
    count = 0
    for entry in SCHEDULES:
        for pp in pps:
            for number in numbers:
                if entry.searched and number not in (1, 2, 3, 8, 16):
                    continue  # seconds each
                dual = entry.name.startswith("dualpipe")
                if dual and (number < 2 * pp or (entry.name == "dualpipe" and (pp % 2 or number % 2))):
                    continue
                for degree in degrees if entry.adjustable else [entry.virtual_stages]:
                    plan = program(entry.name, pp, number, degree)
                    forwards = sum(part.kind is Kind.F for _, _, part in plan.computes())
                    assert forwards == pp * degree * number, (entry.name, pp, number, degree)
                    count += 1
    return count


def test_no_schedule_can_hang() -> None:
    """Sends that wait for their receives, messages in the order of their channel: replayed for every size."""
    assert programs([2, 3], [1, 2], [1, 3, 8]) > 120


@pytest.mark.prove
def test_no_schedule_can_hang_in_any_size() -> None:
    assert programs(range(2, 9), range(1, 5), range(1, 17)) > 3000


def lists(context: Context, overrides: Mapping[str, Any]) -> list[str]:
    assembly = assembled(config_of({**TINY, **overrides}, context.world_size), context)
    return [str(action) for action in assembly.engine.actions]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe"])
def test_the_list_that_was_proven_is_the_list_that_runs(schedule: str) -> None:
    found = pool(2).run(lists, {**SHORT, **TWO, "pipeline.schedule": schedule})
    plan = program(schedule, 2, 8)
    assert found == [[str(action) for action in row] for row in plan.actions]


# ---- resuming -------------------------------------------------------------------------------------------------------


def train(warm: Path, folder: Path, world: int, *overrides: str) -> list[dict[str, Any]]:
    """The real command; returns the lines of metrics.jsonl."""
    words = [
        "-m", "ultrascale.train", "--config", str(Path(__file__).parents[2] / "configs/debug.yaml"), "--device", "cpu",
        f"run.dir={folder}", "model.num_hidden_layers=4", "batch.micro_size=4", "batch.sequence_length=16",
        "checkpoint.every=2", "observe.replica_check_every=1", "precision.compute=float64", *overrides,
    ]  # fmt: skip
    start = [str(warm / "torchrun"), "--nproc-per-node", str(world)] if world > 1 else [str(warm / "python")]
    environment = {**os.environ, **THREADS, "PATH": f"{warm}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run([*start, *words], capture_output=True, text=True, timeout=60, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.prove
def test_a_run_goes_on_under_another_schedule_and_on_one_process(warm: Path, tmp_path: Path) -> None:
    expected = train(warm, tmp_path / "one", 1, "run.steps=6")
    cut = tmp_path / "cut"
    train(warm, cut, 2, "run.steps=2", "parallel.pp=2", "pipeline.schedule=dualpipe")
    train(warm, cut, 2, "run.steps=4", "parallel.pp=2", "pipeline.schedule=zb_v")
    found = train(warm, cut, 1, "run.steps=6")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for line, other in zip(expected, found, strict=True):
        for key in ("loss", "grad_norm"):
            assert other[key] == pytest.approx(line[key], rel=1e-9), (line["step"], key)


@pytest.mark.prove
@pytest.mark.parametrize("schedule", ALL)
def test_a_resumed_pipeline_has_the_bits_of_one_that_never_stopped(schedule: str, warm: Path, tmp_path: Path) -> None:
    """In bf16: fp32 masters and moments are what is saved."""
    layout = ("parallel.pp=2", f"pipeline.schedule={schedule}", "precision.compute=bfloat16")
    whole = train(warm, tmp_path / "whole", 2, "run.steps=4", *layout)
    train(warm, tmp_path / "cut", 2, "run.steps=2", *layout)
    again = train(warm, tmp_path / "cut", 2, "run.steps=4", *layout)
    for line, other in zip(whole, again, strict=True):
        assert (other["loss"], other["grad_norm"]) == (line["loss"], line["grad_norm"])
    saved = [tmp_path / name / "checkpoints/step-00000004/manifest.json" for name in ("whole", "cut")]
    checksums = [
        {
            name: [shard["checksum"] for shard in entry["shards"]]
            for name, entry in json.loads(p.read_text())["tensors"].items()
        }
        for p in saved
    ]
    assert checksums[0] == checksums[1]
