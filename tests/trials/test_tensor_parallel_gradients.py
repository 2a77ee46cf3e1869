"""What tp ranks share has the whole gradient on each of them; what they cut fits together to one process's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from trial_cases import Outcome, compare, copies_are_equal, steps, text

from small import whole

BATCHES = [text([64 - 3 * n for n in range(8)], seed=n) for n in range(2)]
TWO = {"batch.micro_size": 4}
"""Two micro-batches a step: among four ranks a collective takes milliseconds."""
SP, NO_SP = {"parallel.sequence_parallel": True}, {"parallel.sequence_parallel": False}


@pytest.fixture(scope="module")
def one_process() -> list[Outcome]:
    return steps(1, {}, BATCHES)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {"parallel.tp": 2, **SP}),
        (2, {"parallel.tp": 2, **NO_SP}),
        (4, {"parallel.tp": 4, **SP}),  # two KV heads, each on two ranks
        (4, {"parallel.tp": 4, **NO_SP}),
        (4, {"parallel.tp": 2, "parallel.dp": 2, **SP}),
    ],
    ids=str,
)
def test_what_several_ranks_hold_has_the_same_bits_and_the_whole_sum(
    world: int, layout: dict[str, Any], one_process: list[Outcome]
) -> None:
    found = steps(world, {**layout, **TWO}, BATCHES)
    assert copies_are_equal(found, "gradients") >= 9  # two norms a layer, and the last
    compare(one_process, found)


def test_every_norm_under_sequence_parallelism_has_its_gradient_on_both_ranks(one_process: list[Outcome]) -> None:
    found = steps(2, {"parallel.tp": 2, **SP, **TWO}, BATCHES[:1])
    expected = {name: values for name, _, _, values in one_process[0].gradients if "norm" in name}
    assert len(expected) == 4 * 2 + 1
    assert "norm.weight" in expected  # the last one, outside of the layers
    for rank in found:
        gradients = {name: values for name, _, _, values in rank.gradients}
        for name, values in expected.items():
            np.testing.assert_allclose(gradients[name], values, rtol=0, atol=1e-12 * np.abs(values).max())


def test_one_kv_head_is_replicated_over_both_ranks_and_gets_the_gradients_of_both() -> None:
    one_head = {"model.num_key_value_heads": 1}
    expected = steps(1, one_head, BATCHES)
    found = steps(2, {**one_head, **TWO, "parallel.tp": 2}, BATCHES)
    held = [name for name, *_ in found[1].gradients if "k_proj" in name or "v_proj" in name]
    assert len(held) == 8
    compare(expected, found)


def test_every_parameter_has_a_gradient_under_replicas_and_tensor_parallelism() -> None:
    found = steps(4, {"parallel.dp": 2, "parallel.tp": 2, **TWO}, BATCHES[:1])
    gradients = whole([outcome.gradients for outcome in found])
    assert len(gradients) == 4 * 9 + 3
    assert all(np.isfinite(values).all() and np.abs(values).max() > 0 for values in gradients.values())


@pytest.mark.parametrize(("world", "tied"), [(2, True), (4, False)], ids=["tp2 tied", "tp4 untied"])
def test_an_odd_vocabulary_has_the_same_curve_under_tensor_parallelism(world: int, tied: bool) -> None:
    """257 = 1 + 256: what pads it must be in no softmax, get no gradient and be no parameter."""
    odd = {"model.vocab_size": 257, "model.tie_word_embeddings": tied, "batch.sequence_length": 16}
    batches = [text([16] * 8, length=16, vocabulary=257, seed=n) for n in range(4)]
    expected = steps(1, odd, batches)
    found = steps(world, {**odd, **TWO, "parallel.tp": world}, batches)
    compare(expected, found)
    assert whole([o.gradients for o in found])["embed_tokens.weight"].shape == (257, 64)


CHUNKS = (256, 128, 32)  # one, two and eight of a micro-batch


def _chunks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    from ultrascale.parallel import cross_entropy

    monkeypatch.setattr(cross_entropy, "_chunk_rows", lambda weight: rows)


def test_the_number_of_chunks_of_the_loss_changes_no_number(
    monkeypatch: pytest.MonkeyPatch, one_process: list[Outcome]
) -> None:
    for rows in CHUNKS:
        _chunks(monkeypatch, rows)
        compare(one_process, steps(1, TWO, BATCHES), 1e-12)


@pytest.mark.parametrize("rows", CHUNKS)
def test_the_number_of_chunks_changes_no_number_under_tensor_parallelism(rows: int, one_process: list[Outcome]) -> None:
    from pool import pool

    found = pool(2).run(chunked, rows)
    compare(one_process, found)


def chunked(context: Any, rows: int) -> Outcome:
    from trial_cases import on_this_rank

    with pytest.MonkeyPatch.context() as patches:
        _chunks(patches, rows)
        return on_this_rank(context, {"parallel.tp": 2, **TWO}, BATCHES)


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, {}),
        (2, {"parallel.tp": 2}),
        (4, {"parallel.tp": 4}),
        (2, {"parallel.dp": 2}),
        (2, {"parallel.pp": 2}),
        (4, {"parallel.tp": 2, "parallel.pp": 2}),
    ],
    ids=str,
)
def test_the_first_loss_is_that_of_a_uniform_guess(world: int, layout: dict[str, Any]) -> None:
    for outcome in steps(world, {**layout, **TWO, "model.initializer_range": 0.02}, [text([64] * 8)]):
        assert outcome.losses[0] == pytest.approx(math.log(256), rel=0.01)
