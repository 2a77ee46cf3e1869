"""What went wrong where replicas share things out, and in optimizers: a use whose gradient is lost, gradients of another
micro-batch, weights that were not there yet, norms of a part, sums in too few bits, traffic that was not saved.

Held elsewhere:

| report | where |
|---|---|
| BL-069 a replica strays | the run compares copies every `observe.replica_check_every` steps: `tests/parallel/test_replicas.py`, `tests/trainer/test_trainer_replicas.py`; there is no switch to misuse, the plan says when gradients are sent |
| BL-174 the rate runs too fast | `test_ties_depths_and_rates.py`, `tests/optim/test_learning_rate.py`, `tests/trainer/test_trainer_resume.py`; a step that is not finite ends the run, so none is skipped |
| BL-177 Muon on pieces of a matrix | `tests/parity/test_parity_optimizers.py`, and the seeded fault `pieces_of_matrices_are_made_orthogonal` |
| BL-178 fused matrices under Muon | `tests/optim/test_muon.py`: each logical matrix; `tests/parity/test_parity_optimizers.py`: under tp |
| BL-179 groups thrown away | `tests/optim/test_groups.py`; `tests/parity/test_parity_optimizers.py` trains with them under ZeRO |
| BL-191 elements counted twice in the norm | `tests/parity/test_parity.py`, and the seeded fault `replicated_parameters_count_twice_in_the_norm`; below with clipping |
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from trial_cases import TINY, Tokens, compare, steps, text

from pool import Context, pool
from small import assembled, box_of, boxes, config_of, step_batch_of, whole
from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.models.llama import Llama
from ultrascale.models.stage import Stage
from ultrascale.parallel.gradients import GradientError
from ultrascale.parallel.module import Build
from ultrascale.step import evaluate, train_step, with_denominators

Z = "parallel.zero_stage"
SHORT: dict[str, Any] = {"batch.sequence_length": 16, "batch.micro_size": 1, "model.num_hidden_layers": 2}
UNEVEN = [16, 3, 0, 11, 16, 1, 8, 14]


def batches(count: int) -> list[Tokens]:
    return [text(UNEVEN, length=16, seed=n) for n in range(count)]


# ---- a unit that is used twice ----------------------------------------------------------------------------------


class Twice(Llama):
    """Every block is applied twice in a row, under a name for each time."""

    names = ("{}", "{}.again")

    def stage(self, build: Build, layers: range, embedding: bool, head: bool) -> Stage:
        stage = super().stage(build, layers, embedding, head)
        stage.blocks = nn.ModuleList(block for block in stage.blocks for _ in self.names)
        stage.names = [name.format(block) for block in stage.names for name in self.names]
        return stage


class TwiceUnderOneName(Twice):
    names = ("{}", "{}")


TWICE = {**SHORT, "model.family": f"{__name__}:Twice"}


def test_a_block_that_is_applied_twice_has_the_gradients_of_two_that_are_equal() -> None:
    """BL-060, in one process: against a model of twice the depth."""
    (once,) = steps(1, TWICE, batches(1))
    deep = assembled(config_of({**TINY, **SHORT, "model.num_hidden_layers": 4}))
    start = assembled(config_of({**TINY, **TWICE}))
    values = whole([boxes(start, "masters")])
    for bucket in deep.store.buckets:
        for span in bucket.spans:
            master = box_of(deep.store, bucket, span, bucket.masters)
            master.copy_(torch.from_numpy(values[_shared_name(span.layout.name)]))
    train_step(deep, step_batch_of(deep, *batches(1)[0]), 1)
    expected: dict[str, Any] = Counter()
    for name, _, _, gradient in boxes(deep, "gradients"):
        expected[_shared_name(name)] = expected[_shared_name(name)] + gradient
    found = {name: gradient for name, _, _, gradient in once.gradients}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-12 * np.abs(gradient).max(), err_msg=name)


def _shared_name(name: str) -> str:
    """Layers 0 and 1 are applications of the shared layer 0, and so on."""
    first, number, *rest = name.split(".")
    return ".".join([first, str(int(number) // 2), *rest]) if first == "layers" else name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_uses_of_a_block_are_in_its_gradient_before_it_is_sent(stage: int) -> None:
    """BL-060."""
    compare(steps(1, TWICE, batches(2)), steps(2, {**TWICE, "parallel.dp": 2, Z: stage}, batches(2)))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_block_that_is_applied_twice_under_one_name_is_refused(stage: int) -> None:
    """BL-060: its gradients would be sent after the first of its backwards."""
    family = {**SHORT, "model.family": f"{__name__}:TwiceUnderOneName"}
    said = r"(the unit layers\.1 was run twice in one pass|a gradient of layers\.1\.\S+ came after).* in units\(\)"
    with pytest.raises(GradientError, match=said):
        steps(1, {**family, Z: stage}, batches(1))


# ---- driven by hand ---------------------------------------------------------------------------------------------

MICRO_BATCHES = 4


def by_hand(context: Context, stage: int) -> list[float]:
    """Different values of the summed gradients, when each rank and micro-batch adds one of its own to all elements."""
    assembly = assembled(config_of({**TINY, **SHORT, "parallel.dp": 2, Z: stage}, 2), context)
    gradients = assembly.gradients
    gradients.begin_step({0: MICRO_BATCHES - 1})
    for number in range(MICRO_BATCHES):
        for bucket in gradients.buckets:
            for entry in bucket.entries:
                _, _, shape = assembly.store.place[id(entry.parameter)]
                value = torch.full(shape, 10.0**number * (1 + context.rank), dtype=torch.float64)
                gradients.accumulate(entry.parameter, value, 0, number)
        gradients.reduce(0, number)
    gradients.finish()
    seen = {float(value) for *_, values in boxes(assembly, "gradients") for value in np.unique(values)}
    return sorted(seen)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_micro_batches_that_are_driven_by_hand_add_up(stage: int) -> None:
    """BL-061: each is there once, of both ranks, and no element has any other sum."""
    assert pool(2).run(by_hand, stage) == [[3333.0], [3333.0]]


def twice_without_finish(context: Context, stage: int) -> bool:
    """Whether the gradients of a first run survive a second one, which is refused."""
    assembly = assembled(config_of({**TINY, **SHORT, "parallel.dp": 2, Z: stage}, 2), context)
    batch = step_batch_of(assembly, *batches(1)[0])
    assembly.engine.run(batch)
    with pytest.raises(GradientError, match=r"still on their way; call Gradients\.finish\(\)"):
        assembly.engine.run(batch)
    assembly.gradients.finish()
    kept = boxes(assembly, "gradients")
    assembly.engine.run(batch)
    assembly.gradients.finish()
    again = boxes(assembly, "gradients")
    return all(np.array_equal(one[3], other[3]) for one, other in zip(kept, again, strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_backward_before_gradients_are_whole_is_refused(stage: int) -> None:
    """BL-061."""
    assert pool(2).run(twice_without_finish, stage) == [True, True]


# ---- weights that come late -------------------------------------------------------------------------------------


def late(tensor: torch.Tensor, group: Any, into: torch.Tensor | None = None) -> Pending:
    """An all-gather whose result is there when it is awaited and not before; until then there is NaN."""
    real = GATHER(tensor.clone(), group)
    if into is None or group.size == 1:
        return real if into is None else Pending(into.copy_(tensor))
    own = slice(group.index * tensor.shape[0], (group.index + 1) * tensor.shape[0])
    kept = into[own].clone()
    into.fill_(torch.nan)
    into[own] = kept
    target = into
    return Pending(target, finish=lambda: target.copy_(real.wait()))


GATHER = collectives.all_gather


def evaluated_and_trained(context: Context, overrides: Mapping[str, Any], is_late: bool) -> list[Any]:
    """Losses of an evaluation, a step, an evaluation, a step; and the weights at the end."""
    config = config_of({**TINY, **SHORT, "precision.compute": "float32", "parallel.dp": 2, **overrides}, 2)
    with patch.object(collectives, "all_gather", late if is_late else GATHER):
        assembly = assembled(config, context)
        seen: list[Any] = []
        for number, tokens in enumerate(batches(2), 1):
            batch = with_denominators(assembly, step_batch_of(assembly, *tokens).micro_batches)
            seen += [evaluate(assembly, [batch]), train_step(assembly, batch, number).report["loss"]]
        seen.append(evaluate(assembly, [batch]))
    return [*seen, *(values.tobytes() for *_, values in boxes(assembly, "masters"))]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_however_late_weights_arrive_no_bit_changes(stage: int) -> None:
    """BL-064: also for an evaluation before the first step, and right behind one."""
    for more in ({}, {"batch.micro_size": 4}):
        plain = pool(2).run(evaluated_and_trained, {Z: stage, "parallel.overlap": False, **more}, False)
        assert pool(2).run(evaluated_and_trained, {Z: stage, **more}, True) == plain
        assert all(np.isfinite(loss) for loss in plain[0][:5])


# ---- norm and clipping ------------------------------------------------------------------------------------------

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel.dp": 2, Z: 3}),
    (2, {"parallel.dp": 2, Z: 1}),
    (4, {"parallel.dp": 2, "parallel.tp": 2, Z: 3}),  # norms are replicated over tp, all else is cut
    (4, {"parallel.dp": 4, "parallel.dp_shard": 2, Z: 2}),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_clipping_is_by_the_norm_of_the_whole_gradient(world: int, layout: dict[str, Any]) -> None:
    """BL-065 and BL-191: the norm that is told is one number on all ranks, and what the update was scaled by."""
    settings = {**SHORT, "optimizer.max_norm": 0.05, "batch.micro_size": 2}
    expected = steps(1, settings, batches(2))
    assert min(expected[0].norms) > 4 * 0.05
    found = steps(world, {**settings, **layout}, batches(2))
    compare(expected, found)
    assert all(outcome.norms == found[0].norms for outcome in found)


# ---- formats of sums --------------------------------------------------------------------------------------------


def summed(context: Context, reduce: str | None) -> tuple[float, float]:
    """(largest error of a summed gradient, rounding of one term), relative to the sum of the terms' sizes."""
    precision = {"precision.compute": "bfloat16", "precision.reduce": reduce}
    assembly = assembled(config_of({**TINY, **SHORT, **precision, "parallel.dp": 4}, 4), context)
    bucket = assembly.store.buckets[0]
    parts = [torch.randn(bucket.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assembly.gradients.begin_step({0: 0})
    assert bucket.accumulator is not None
    bucket.accumulator.copy_(parts[context.rank])
    assembly.gradients.reduce(0, 0)
    assembly.gradients.finish()
    exact = torch.stack(parts).double().sum(dim=0)
    sizes = torch.stack(parts).double().abs().sum(dim=0)
    error = ((bucket.gradients.double() - exact).abs() / sizes).max()
    return float(error), torch.finfo(assembly.policy.reduce).eps / 2


def test_gradients_of_a_bfloat16_model_are_summed_in_float32_unless_asked() -> None:
    """BL-067: each of n − 1 additions rounds, and in bfloat16 that is seen."""
    (default, float32), *_ = pool(4).run(summed, None)
    (asked, bfloat16), *_ = pool(4).run(summed, "bfloat16")
    assert (float32, bfloat16) == (2.0**-24, 2.0**-8)
    assert default <= 4 * float32
    assert bfloat16 / 2 < asked <= 5 * bfloat16  # each term is rounded once, too
    assert config_of({"precision.compute": "bfloat16"}).precision.reduce == "float32"


# ---- traffic ----------------------------------------------------------------------------------------------------


def calls(context: Context, overrides: Mapping[str, Any]) -> dict[str, int]:
    """Collectives of one step by phase: gathers of weights, and sums of gradients."""
    config = config_of({**TINY, **SHORT, "parallel.dp": 2, "parallel.bucket_bytes": 1, **overrides}, 2)
    assembly = assembled(config, context)
    context.ledger.clear()
    kept = (UNEVEN * 2)[: config.batch.global_size]
    train_step(assembly, step_batch_of(assembly, *text(kept, length=16)), 1)
    counts = Counter(row.phase for row in context.ledger.rows)
    return {phase: counts[phase] for phase in ("gather", "reduce")}


def test_accumulation_saves_the_collectives_that_it_should() -> None:
    """BL-190: with four units, once a step at stages 0 and 1 (there an exchange, a sum and a gather), and once a
    micro-batch where gradients, or weights too, are shared out."""
    units = 4  # embedding, two blocks, head
    for micro_batches in (1, 4):
        size = {"batch.global_size": 2 * micro_batches}
        expected = {
            0: {"gather": 0, "reduce": 2 * units},
            1: {"gather": units, "reduce": units},
            2: {"gather": units, "reduce": micro_batches * units},
            3: {"gather": 2 * micro_batches * units, "reduce": micro_batches * units},
        }
        for stage, counts in expected.items():
            found = pool(2).run(calls, {Z: stage, **size})
            assert found == [counts, counts], f"stage {stage}, {micro_batches} micro-batches"
    kept = pool(2).run(calls, {Z: 3, "batch.global_size": 8, "parallel.keep_gathered": True})
    assert kept == [{"gather": units, "reduce": 4 * units}] * 2
