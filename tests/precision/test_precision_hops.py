"""The dtype of every hop of a number: computed, accumulated, reduced, applied; and what a narrower one would lose."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pool import Context, pool
from small import assembled, boxes, config_of, step_batch_of, tokens
from ultrascale import trainer
from ultrascale.assembly import Assembly
from ultrascale.comm.ledger import Row
from ultrascale.config.schema import Config
from ultrascale.models import stage
from ultrascale.models.batch import StepBatch
from ultrascale.precision.policy import Policy, wide

BF16 = {"precision.compute": "bfloat16", "model.num_hidden_layers": 1}
MANY = 4096


def first_matrix(assembly: Assembly, name: str) -> tuple[torch.nn.Parameter, torch.Tensor]:
    """A parameter and its gradients, as the modules and the sink know them."""
    for bucket in assembly.gradients.buckets:
        for entry, start in zip(bucket.entries, bucket.starts, strict=True):
            if any(layout.name == name for layout in entry.stored.members):
                view = bucket.gradients[start : start + entry.parameter.numel()].view(entry.parameter.shape)
                return entry.parameter, view
    raise AssertionError(name)


# ---- produced and accumulated -----------------------------------------------------------------------------------


def test_the_policy_of_each_compute_dtype() -> None:
    assert Policy.of(config_of({"precision.compute": "float64"})) == Policy(*[torch.float64] * 5)
    assert Policy.of(config_of({"precision.compute": "float32"})) == Policy(*[torch.float32] * 5)
    bf16 = Policy.of(config_of({"precision.compute": "bfloat16"}))
    assert bf16 == Policy(torch.bfloat16, *[torch.float32] * 4)
    narrow = Policy.of(config_of({"precision.compute": "bfloat16", "precision.reduce": "bfloat16"}))
    assert (narrow.accumulate, narrow.reduce) == (torch.float32, torch.bfloat16)
    assert [wide(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [torch.float32] * 3


def test_thousands_of_tiny_gradients_add_up() -> None:
    """In bfloat16 a sum stops growing at 256 equal terms."""
    assembly = assembled(config_of(BF16))
    sink, tiny = assembly.gradients, 2.0**-20
    sink.begin_step({0: MANY - 1})
    matrix, matrix_gradient = first_matrix(assembly, "layers.0.attention.o_proj.weight")
    norm, norm_gradient = first_matrix(assembly, "norm.weight")
    embedding, embedding_gradient = first_matrix(assembly, "embed_tokens.weight")
    dy = torch.full((1, 16), tiny, dtype=torch.bfloat16)
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    row = torch.tensor([5])
    for number in range(MANY):
        sink.accumulate_product(matrix, dy, x, 0, number)
        sink.accumulate(norm, dy[0], 0, number)
        sink.accumulate_rows(embedding, row, dy, 0, number)
    assert (matrix_gradient == MANY * tiny).all()
    assert (norm_gradient == MANY * tiny).all()
    assert (embedding_gradient[5] == MANY * tiny).all()
    assert torch.count_nonzero(embedding_gradient) == 16


def test_many_equal_micro_batches_give_many_times_one_gradient() -> None:
    """Through the whole of forward and backward: float32 rounding is left, bfloat16 would be off by percents."""
    many = 128

    def gradients(count: int) -> dict[str, np.ndarray]:
        assembly = assembled(config_of({**BF16, "batch.global_size": count}))
        one = step_batch_of(assembly, *(t[:, :1] for t in tokens(config_of(BF16))))
        assembly.engine.run(StepBatch(list(one.micro_batches) * count, {"targets": 1000, "rows": 1}))
        assembly.gradients.finish()
        return {name: values for name, _, _, values in boxes(assembly, "gradients")}

    single, total = gradients(1), gradients(many)
    for name, values in single.items():
        error = np.abs(total[name] - many * values).max() / np.abs(many * values).max()
        assert error < 1e-5, f"{name} is off by {error:.3g}"


def test_sums_and_norms_of_bfloat16_are_float32_or_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[torch.dtype] = []
    original = stage.rotation

    def watched(*args: Any) -> Any:
        made = original(*args)
        tables.extend(table.dtype for table in made)
        return made

    monkeypatch.setattr(stage, "rotation", watched)
    assembly = assembled(config_of({**BF16, "model.z_loss_coefficient": 0.01}))
    outputs = assembly.engine.run(step_batch_of(assembly, *tokens(assembly.config)))
    assembly.gradients.finish()
    assert {value.dtype for output in outputs for value in output.values()} == {torch.float32}
    assert set(tables) == {torch.float32}
    assert assembly.stages[0].frequency.inverse.dtype == torch.float64  # type: ignore[attr-defined]
    assert assembly.gradients.square_sum().dtype == torch.float64
    for bucket in assembly.gradients.buckets:
        assert bucket.weights.dtype == torch.bfloat16
        assert bucket.masters.dtype == bucket.gradients.dtype == torch.float32
    logits = assembly.evaluation.run(step_batch_of(assembly, tokens(assembly.config)[0], None))
    assert logits[0]["logits"].dtype == torch.float32


def test_activations_of_bfloat16_travel_as_bfloat16() -> None:
    config = config_of({**BF16, "parallel.tp": 2, "model.num_hidden_layers": 2}, 2)
    for rows in pool(2).run(_rows, config):
        passes = [row for row in rows if row.axes == ("tp",) and row.phase in ("forward", "backward")]
        layers = [row for row in passes if row.op in ("all_gather", "reduce_scatter")]
        assert len(layers) > 10
        assert {row.dtype for row in layers} == {"bfloat16"}
        assert {row.dtype for row in passes if row.op == "all_reduce"} == {"float32"}


# ---- reduced ----------------------------------------------------------------------------------------------------


def _rows(context: Context, config: Config) -> list[Row]:
    return _reduced(context, config)[0]


def _reduced(context: Context, config: Config) -> tuple[list[Row], list[torch.Tensor], list[torch.Tensor]]:
    """(the ledger, gradients before their reduction, after it)"""
    assembly = assembled(config, context)
    before: list[torch.Tensor] = []
    issue = assembly.gradients._issue

    def watched(bucket: Any) -> None:
        before.append(bucket.gradients.clone())
        issue(bucket)

    assembly.gradients._issue = watched  # type: ignore[method-assign]
    assembly.engine.run(step_batch_of(assembly, *tokens(config)))
    assembly.gradients.finish()
    return context.ledger.rows, before, [bucket.gradients for bucket in assembly.gradients.buckets]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("reduce", "size"), [("bfloat16", 2), ("float32", 4), ("float64", 8), (None, 4)])
def test_gradients_travel_in_the_dtype_of_the_config(reduce: str | None, size: int, deterministic: bool) -> None:
    settings = {**BF16, "parallel.dp": 2, "precision.reduce": reduce}
    settings["parallel.deterministic_reduction"] = deterministic
    config = config_of(settings, 2)
    numel = sum(bucket.numel for bucket in assembled(config_of(BF16)).gradients.buckets)
    ranks = pool(2).run(_reduced, config)
    for rows, _, after in ranks:
        messages = [row for row in rows if row.axes == ("dp",) and row.phase == "reduce"]
        assert {row.dtype for row in messages} == {reduce or "float32"}
        assert sum(row.bytes for row in messages) == numel * size  # 2·G·(N − 1)/N with N = 2
        assert all(gradient.dtype == torch.float32 for gradient in after)
    _, first, after = ranks[0]
    _, second, _ = ranks[1]
    dtype = getattr(torch, reduce or "float32")
    for one, other, total in zip(first, second, after, strict=True):
        assert torch.equal(total, (one.to(dtype) + other.to(dtype)).float())


@pytest.mark.parametrize("reduce", ["bfloat16", "float32"])
def test_parts_over_tensor_axes_travel_in_that_dtype_too(reduce: str) -> None:
    config = config_of({**BF16, "parallel.tp": 2, "precision.reduce": reduce}, 2)
    for rows in pool(2).run(_rows, config):
        assert {row.dtype for row in rows if row.phase == "reduce"} == {reduce}


@pytest.fixture
def signals_are_restored() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals_are_restored")
@pytest.mark.parametrize("reduce", ["bfloat16", None])
def test_the_run_manifest_records_every_dtype(tmp_path: Path, reduce: str | None) -> None:
    settings = {**BF16, "precision.reduce": reduce, "run.dir": str(tmp_path / "run"), "parallel.dp": 1}
    config = config_of({**settings, "model.vocab_size": 300})
    assert trainer.run(config, device="cpu", rank=0, world_size=1, local_rank=0) == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["precision"] == {
        "compute": "bfloat16", "master": "float32", "accumulate": "float32", "reduce": reduce or "float32",
    }  # fmt: skip


# ---- applied ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_updates_too_small_for_the_compute_dtype_survive_in_the_masters(optimizer: str) -> None:
    """1e-3 of a weight is below half a bit of bfloat16: a hundred such steps would leave it where it was."""
    assembly = assembled(config_of({**BF16, "optimizer.name": optimizer, "optimizer.max_norm": None}))
    start = [bucket.masters.clone() for bucket in assembly.gradients.buckets]
    steps, share = 100, 1e-3
    for step in range(1, steps + 1):
        for bucket, first in zip(assembly.gradients.buckets, start, strict=True):
            # AdamW turns it into ±lr whatever its size; SGD takes it as it is.
            bucket.gradients.copy_(first if optimizer == "sgd" else torch.sign(first))
        assembly.optimizer.step(step, share, 1.0)
    for bucket, first in zip(assembly.gradients.buckets, start, strict=True):
        moved = first - bucket.masters
        expected = first * steps * share if optimizer == "sgd" else torch.sign(first) * steps * share
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)
        assert torch.equal(bucket.weights, bucket.masters.bfloat16())
        assert not torch.equal(bucket.weights, first.bfloat16())


def test_parameters_are_the_masters_rounded_from_the_first_step_on() -> None:
    assembly = assembled(config_of(BF16))
    rounded = 0
    for bucket in assembly.gradients.buckets:
        assert torch.equal(bucket.weights, bucket.masters.bfloat16())
        rounded += int((bucket.masters != bucket.weights.float()).sum())
    assert rounded > 1000  # the masters hold more than the parameters say
