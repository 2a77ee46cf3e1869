"""Split backward and overlapped pairs: the same numbers to the bit, the same collectives, and what is held between."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_engine_memory import Storages

from pool import Context, pool
from small import assembled, boxes, config_of, step_batch_of, tokens
from ultrascale.assembly import Assembly
from ultrascale.config.schema import Config
from ultrascale.pipeline.actions import Action, Kind, Plan, pair
from ultrascale.pipeline.engine import Engine
from ultrascale.pipeline.validate import validate

Rewrite = Callable[[list[Action]], list[Action]]


def split_at_once(row: list[Action]) -> list[Action]:
    """BI and BW in place of every B."""
    return [part for action in row for part in _halves(action)]


def split_and_wait(row: list[Action]) -> list[Action]:
    """As `split_at_once`, every BW as late as it goes: before the stage's REDUCE."""
    halves = split_at_once(row)
    weights = [action for action in halves if action.kind is Kind.BW]
    rest = [action for action in halves if action.kind is not Kind.BW]
    reduce = next(index for index, action in enumerate(rest) if action.kind is Kind.REDUCE)
    return [*rest[:reduce], *weights, *rest[reduce:]]


def in_pairs(row: list[Action]) -> list[Action]:
    """The first forward alone, then each forward with the backward of the micro-batch before it."""
    forwards = [action for action in row if action.kind is Kind.F]
    backwards = [action for action in row if action.kind is Kind.B]
    pairs = [pair(forward, backward) for forward, backward in zip(forwards[1:], backwards, strict=False)]
    return [forwards[0], *pairs, backwards[-1], *(action for action in row if action.kind is Kind.REDUCE)]


def in_pairs_and_split(row: list[Action]) -> list[Action]:
    """Pairs of a forward and an input gradient; each weight gradient follows."""
    found: list[Action] = []
    for action in in_pairs(row):
        if action.kind is Kind.FB:
            backward_input, backward_weight = _halves(action.parts[1])
            found += [pair(action.parts[0], backward_input), backward_weight]
        else:
            found += _halves(action)
    return found


def _halves(action: Action) -> list[Action]:
    if action.kind is not Kind.B:
        return [action]
    return [replace(action, kind=Kind.BI), replace(action, kind=Kind.BW)]


REWRITES = {None: lambda row: row} | {
    rewrite.__name__: rewrite for rewrite in (split_at_once, split_and_wait, in_pairs, in_pairs_and_split)
}


def with_plan(assembly: Assembly, rewrite: Rewrite) -> Engine:
    """An engine of one stage that does the same in another order."""
    plan = assembly.plan
    (row,) = plan.actions
    rewritten: Plan = replace(plan, actions=(tuple(rewrite(list(row))),))
    validate(rewritten)
    engine = assembly.engine
    return Engine(
        rewritten, engine.stages, engine.pipeline, engine.objective, engine.gradients, engine.weights, engine.buffer
    )


def gradients_of(assembly: Assembly, rewrite: str | None) -> list[tuple[str, np.ndarray]]:
    engine = with_plan(assembly, REWRITES[rewrite])
    engine.run(step_batch_of(assembly, *tokens(assembly.config)))
    assembly.gradients.finish()
    return [(name, values) for name, _, _, values in boxes(assembly, "gradients")]


def _gradients(context: Context, config: Config) -> dict[str | None, list[tuple[str, np.ndarray]]]:
    assembly = assembled(config, context)
    return {rewrite: gradients_of(assembly, rewrite) for rewrite in REWRITES}


TIED = {"model.tie_word_embeddings": True}
LAYOUTS: list[dict[str, Any]] = [
    {"parallel.tp": 2, "parallel.sequence_parallel": True, **TIED},
    {"parallel.tp": 2, "parallel.sequence_parallel": False, "recompute.mode": "full"},
    {"parallel.tp": 2, "parallel.sequence_parallel": True, "recompute.mode": "selective"},
    {"parallel.dp": 2, "parallel.bucket_bytes": 1, **TIED, "batch.global_size": 8},
    {"parallel.dp": 2, "precision.compute": "bfloat16", "batch.global_size": 8},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_have_the_same_bits_however_the_backward_is_cut(layout: dict[str, Any]) -> None:
    """A tie is used twice: its two parts add up in another order when one of them waits."""
    for found in pool(2).run(_gradients, config_of({"model.z_loss_coefficient": 0.01, **layout}, 2)):
        expected = found.pop(None)
        assert sum(bool(np.any(values)) for _, values in expected) > 10
        for rewrite, gradients in found.items():
            for (name, values), (_, wanted) in zip(gradients, expected, strict=True):
                if name == "embed_tokens.weight" and layout.get("model.tie_word_embeddings"):
                    np.testing.assert_allclose(values, wanted, rtol=1e-13, atol=1e-16, err_msg=f"{rewrite}: {name}")
                else:
                    assert np.array_equal(values, wanted), f"{rewrite}: {name}"


def _rows(context: Context, config: Config, rewrite: str | None) -> list[tuple[str, str, str, int]]:
    assembly = assembled(config, context)
    context.ledger.clear()
    gradients_of(assembly, rewrite)
    return [(row.phase, row.op, row.note, row.bytes) for row in context.ledger.rows]


SP = {"parallel.tp": 2, "parallel.sequence_parallel": True}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("rewrite", ["split_and_wait", "in_pairs", "in_pairs_and_split"])
def test_cutting_the_backward_adds_no_collective(rewrite: str, recompute: str) -> None:
    config = config_of({**SP, "recompute.mode": recompute}, 2)
    whole, cut = (pool(2).run(_rows, config, name)[0] for name in (None, rewrite))
    assert Counter(cut) == Counter(whole)
    assert cut != whole


def test_the_collectives_of_a_pair_alternate() -> None:
    """While the forward waits for one of its own, the backward issues the next of its own, and the other way round."""
    rows = pool(2).run(_rows, config_of({**SP, "batch.global_size": 2}, 2), "in_pairs")[0]
    calls = [phase for phase, op, *_ in rows if op != "mark" and phase in ("forward", "backward")]
    alone = len(calls) // 4  # the first forward's are the first quarter or less, the last backward's the last
    paired = calls[alone:-alone]
    changes = sum(before != after for before, after in itertools.pairwise(paired))
    assert changes > len(paired) / 2, f"{changes} changes in {len(paired)} collectives of a pair"
    # A GEMM of one hides behind a collective of the other: a weight gradient is computed between the issue of a forward
    # collective and the next forward one.
    hidden = [
        index
        for index, (before, after) in enumerate(itertools.pairwise(rows))
        if before[0] == "forward" and before[1] != "mark" and after[0] == "backward"
    ]
    assert len(hidden) > 4
    sequential = pool(2).run(_rows, config_of({**SP, "batch.global_size": 2}, 2), None)[0]
    order = [phase for phase, op, *_ in sequential if op != "mark" and phase in ("forward", "backward")]
    assert sum(before != after for before, after in itertools.pairwise(order)) == 3


# ---- what is held between BI and BW -------------------------------------------------------------------------------


def held_bytes(config: Config) -> dict[Kind, int]:
    """Bytes alive after the F, the BI and the BW of the second of two micro-batches, over those before its F."""
    assembly = assembled(config)
    engine = with_plan(assembly, split_at_once)
    batch = step_batch_of(assembly, *tokens(config))
    engine.run(batch)
    assembly.gradients.finish()  # from here on caches are full
    alive: dict[Kind, int] = {}
    execute = dict(engine._execute)
    with Storages() as storages:

        def noting(action: Action) -> None:
            if action.kind is Kind.F and action.micro_batch == 1:
                alive[Kind.B] = sum(storages.alive())
            execute[action.kind](action)
            if action.micro_batch == 1:
                alive[action.kind] = sum(storages.alive()) - alive[Kind.B]

        engine._execute = dict.fromkeys(execute, noting)
        engine.run(batch)
        assembly.gradients.finish()
    return alive


MODEL = {"batch.global_size": 2, "batch.sequence_length": 64, "model.num_hidden_layers": 3}


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_an_input_gradient_leaves_only_what_weight_gradients_need(recompute: str) -> None:
    """Of each linear its input and the gradient of its output, and nothing of attention, norms or residuals.

    Inputs: two norms, the attention's and SwiGLU's result; gradients: of qkv, gate and up, and twice of the residual
    stream's width. The head has its own: the norm's result and the gradient of its logits. The embedding keeps the
    gradient of what it gave.
    """
    config = config_of({**MODEL, "recompute.mode": recompute}, 1)
    model, tokens_ = config.model, 64
    hidden, ffn = model.hidden_size, model.intermediate_size
    assert model.head_dim is not None
    assert model.num_key_value_heads is not None
    qkv = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    block = 3 * hidden + ffn + qkv + 2 * ffn + 2 * hidden
    head = hidden + model.vocab_size
    expected = 8 * tokens_ * (3 * block + head + hidden)
    found = held_bytes(config)
    assert 0 <= found[Kind.BW] < 1000  # the scalar that the last stage reports
    assert found[Kind.BI] - found[Kind.BW] == pytest.approx(expected, rel=0.02)
    if recompute == "none":
        assert found[Kind.BI] < found[Kind.F]


def test_a_graph_that_lives_until_the_weight_gradients_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = held_bytes(config_of(MODEL, 1))[Kind.BI]
    original = Engine._input_backward
    kept: list[Any] = []

    def keeping(self: Engine, action: Action) -> None:
        kept.append(self._in_flight[action.stage, action.micro_batch].roots)
        original(self, action)

    monkeypatch.setattr(Engine, "_input_backward", keeping)
    monkeypatch.setattr(torch.autograd, "backward", _retaining(torch.autograd.backward))
    assert held_bytes(config_of(MODEL, 1))[Kind.BI] > 1.2 * whole


def _retaining(backward: Callable[..., None]) -> Callable[..., None]:
    return lambda *args: backward(*args, retain_graph=True)
