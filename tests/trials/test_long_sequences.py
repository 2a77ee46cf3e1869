"""What went wrong in others' context parallelism and packing: windows that were dropped, positions that restarted,
lengths that did not divide, documents that saw each other.

Elsewhere: every pair of features on all ranks (pytorch/torchtitan#2536) is the matrix of tests/parity/context.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from trial_cases import TINY, compare, steps, text

from pool import Context, pool
from small import assembled, config_of, step_batch_of
from ultrascale.config.problem import ConfigError
from ultrascale.config.schema import Config
from ultrascale.models.batch import MicroBatch
from ultrascale.parallel import check as parallel_check
from ultrascale.parallel.context.split import CONTIGUOUS, ZIGZAG, Cut, order, own_places, rank_runs
from ultrascale.parallel.passes import Pass

KEPT = [64, 3, 0, 41, 64, 1, 8, 60]
TWO: dict[str, Any] = {"parallel.cp": 2}
ALTERNATE = {
    "model.sliding_window": 8,
    "model.layer_types": ("sliding_attention", "full_attention") * 2,
}


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_windows_of_alternate_layers_hold_under_context_parallelism(method: str) -> None:
    """BL-029, huggingface/accelerate#4177."""
    batches = [text(KEPT)]
    compare(steps(1, ALTERNATE, batches), steps(2, {**ALTERNATE, **TWO, "context.method": method}, batches))


def _logits(context: Context | None, config: Config, inputs: torch.Tensor) -> np.ndarray:
    """This rank's [seq / cp, batch, vocabulary] of one micro-batch."""
    assembly = assembled(config, context)
    batch: MicroBatch = step_batch_of(assembly, inputs, None).micro_batches[0]
    (stage,) = assembly.stages.values()
    with torch.no_grad():
        out = stage(None, batch, Pass(0, 0, None))
    assert isinstance(out, dict)
    return out["logits"].numpy()


def logits(config: Config, inputs: torch.Tensor) -> np.ndarray:
    """[seq, batch, vocabulary], in the order of the sequence."""
    cp = config.parallel.cp
    parts = pool(cp).run(_logits, config, inputs) if cp > 1 else [_logits(None, config, inputs)]
    whole = np.empty((inputs.shape[0], *parts[0].shape[1:]))
    for part, runs in zip(parts, rank_runs(inputs.shape[0], (0,), Cut.of(config)), strict=True):
        whole[order(runs)] = part
    return whole


@pytest.mark.parametrize("cp", [1, 2])
def test_a_token_beyond_the_window_changes_nothing(cp: int) -> None:
    """BL-029: two layers of window 8 see 15 tokens, their own included."""
    settings = {**TINY, "model.num_hidden_layers": 2, "model.sliding_window": 8, "batch.global_size": 2}
    config = config_of({**settings, "parallel.cp": cp}, cp)
    inputs, _ = text([64, 64])
    changed = inputs.clone()
    changed[20] = (changed[20] + 1) % 256
    same = (logits(config, inputs) == logits(config, changed)).all(axis=(1, 2))
    assert same[:20].all()
    assert not same[20:35].any()
    assert same[35:].all()


# ---- positions and shapes -------------------------------------------------------------------------------------------


def _positions(context: Context, config: Config) -> tuple[list[int], list[int]]:
    """Places of this rank's tokens in the sequence, as the batch says and as its stage's rotations say."""
    assembly = assembled(config, context)
    inputs, labels = text(KEPT)
    batch = step_batch_of(assembly, inputs, labels).micro_batches[0]
    (stage,) = assembly.stages.values()
    current = Pass(0, 0, None)
    hidden = torch.zeros(batch.inputs.shape[0], 2, config.model.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        stage(hidden if assembly.mesh.index(context.rank, ["pp"]) else None, batch, current)
    assert current.rotation is not None
    cos, sin = current.rotation
    turned = torch.atan2(sin[:, 0, 0, 0], cos[:, 0, 0, 0])  # the first pair turns by one radian a position
    angles = torch.atan2(torch.arange(64.0).sin(), torch.arange(64.0).cos())
    return batch.positions[:, 0].tolist(), [int((angles - angle).abs().argmin()) for angle in turned]


def test_every_stage_turns_by_the_places_of_its_own_tokens() -> None:
    """BL-030, pytorch/torchtitan#792."""
    config = config_of({**TINY, **TWO, "parallel.pp": 2}, 4)
    seen = pool(4).run(_positions, config)
    for stage in (seen[:2], seen[2:]):
        assert sorted(stage[0][0] + stage[1][0]) == list(range(64))
        for positions, turned in stage:
            assert positions == turned
    compare(steps(1, {}, [text(KEPT)]), steps(4, {**TWO, "parallel.pp": 2}, [text(KEPT)]))


def test_an_odd_number_of_heads_is_not_taken_for_tokens() -> None:
    """BL-031, pytorch/torchtitan#3681."""
    odd = {"model.num_attention_heads": 3, "model.num_key_value_heads": 3, "model.head_dim": 6}
    batches = [text(KEPT)]
    expected = steps(1, odd, batches)
    for method in ("ring", "allgather"):
        compare(expected, steps(2, {**odd, **TWO, "context.method": method}, batches))
    config = config_of({**TINY, **odd, **TWO, "context.method": "ulysses"}, 2)
    (problem,) = parallel_check.check(config)
    assert "the 3 query heads of a tp rank" in problem.message
    assert problem.message.endswith("use hybrid, or ring")


# ---- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "cp"), [(61, 2), (61, 4), (62, 4)])
def test_a_length_that_does_not_divide_is_refused_or_padded_out_of_sight(length: int, cp: int) -> None:
    """BL-034, jzhang38/EasyContext#47."""
    settings: dict[str, Any] = {"batch.sequence_length": length, "model.num_hidden_layers": 2}
    cut = {**settings, "parallel.cp": cp}
    (problem,) = parallel_check.check(config_of({**TINY, **cut}, cp))
    assert problem.key == "batch.sequence_length"
    assert "context.pad=true" in problem.message
    batches = [text([min(kept, length) for kept in KEPT], length=length)]
    compare(steps(1, settings, batches), steps(cp, {**cut, "context.pad": True}, batches))


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("kind", [ZIGZAG, CONTIGUOUS])
def test_what_was_cut_is_put_together_in_the_order_it_had(cp: int, kind: str) -> None:
    """BL-035, pytorch/pytorch#152261: tokens, and logits in `test_a_token_beyond_the_window_changes_nothing`."""
    cut, length = Cut(cp, 1, kind), 24
    tokens = np.arange(2 * length, dtype=np.int64).reshape(length, 2)
    whole = np.full_like(tokens, -1)
    for rank, runs in enumerate(rank_runs(length, (0,), cut)):
        whole[order(runs)] = tokens[own_places(length, None, cut, rank), np.arange(2)]
    assert np.array_equal(whole, tokens)


# ---- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{}, TWO, {**TWO, "parallel.pp": 2}, {**TWO, "kernels.attention": "reference"}])
def test_the_loss_of_packed_documents_is_that_of_each_alone(layout: dict[str, Any]) -> None:
    """BL-182, huggingface/transformers#46634. Two documents of 24 and 40 tokens, and each in a row of its own.

    The rotations know differences of positions alone, so that a document may stand anywhere.
    """
    inputs, labels = text([64] * 4)
    # Alone: the first rows hold the first documents, padded; the others the second ones.
    alone_inputs, alone_labels = torch.zeros(64, 8, dtype=torch.int64), torch.full((64, 8), -100)
    for column in range(4):
        for row, part in ((column, slice(0, 24)), (column + 4, slice(24, 64))):
            size = part.stop - part.start
            alone_inputs[:size, row], alone_labels[:size, row] = inputs[part, column], labels[part, column]
    world = int(np.prod([value for key, value in layout.items() if key.startswith("parallel.")], dtype=int))
    alone = steps(1, {}, [(alone_inputs, alone_labels)])
    packed = steps(world, {**layout, "batch.global_size": 4}, [(inputs, labels)], documents=[(0, 24)] * 4)
    compare(alone, packed, tolerance=1e-8)  # positions of up to 64 radians are rounded once more


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_tokens_behind_change_nothing_before_them(backend: str) -> None:
    """BL-184, pacman100/LLM-Workshop#1: what pads a row stands at its end, where causal attention does not look."""
    settings = {**TINY, "model.num_hidden_layers": 2, "batch.global_size": 2, "kernels.attention": backend}
    inputs, _ = text([64, 64])
    whole = logits(config_of(settings), inputs)
    short = logits(config_of({**settings, "batch.sequence_length": 40}), inputs[:40])
    np.testing.assert_allclose(whole[:40], short, rtol=1e-12, atol=1e-12)


def test_the_command_line_refuses_what_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match="world size 3"):
        config_of({**TINY, "parallel.cp": 2}, 3)
