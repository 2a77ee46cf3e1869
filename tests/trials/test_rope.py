"""Rotary positions in the precision they need.

| trial | here |
|---|---|
| BL-181 rotation in low precision | all of this file; figures in docs/long_context.md |
| BL-182, BL-184 of the same area | `test_long_sequences.py` |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import pytest
import torch
from trial_cases import TINY, text

from small import assembled, config_of, step_batch_of
from ultrascale.kernels import reference
from ultrascale.models import stage
from ultrascale.models.rope import Frequencies, inverse_frequencies, rotation

LENGTH = 512
BASES = [1e4, 5e5]
Rotation = Callable[[torch.Tensor, Frequencies, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


def tables_in(dtype: torch.dtype) -> Rotation:
    """q and k are rotated in this dtype; the angles are as they should be."""
    return lambda positions, frequency, _: rotation(positions, frequency, dtype)


def angles_in_bfloat16(
    positions: torch.Tensor, frequency: Frequencies, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What becomes of a table that a `.to(bfloat16)` reached: positions above 256 are not even numbers of it."""
    angle = positions.unsqueeze(-1).to(torch.bfloat16) * frequency.inverse.to(torch.bfloat16)
    return angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)


@cache
def logits(base: float, rotated: Rotation) -> torch.Tensor:
    """[seq, batch, vocabulary] of a float64 model in which nothing but the rotation is narrow."""
    settings = {
        "batch.sequence_length": LENGTH, "batch.global_size": 2, "model.num_hidden_layers": 2,
        "model.initializer_range": 0.2, "model.rope_theta": base,
    }  # fmt: skip
    assembly = assembled(config_of({**TINY, **settings}))
    inputs, _ = text([LENGTH] * 2, length=LENGTH)
    with torch.no_grad(), patch.object(stage, "rotation", rotated):
        (out,) = assembly.evaluation.run(step_batch_of(assembly, inputs, None))
    return out["logits"]


def error(base: float, rotated: Rotation) -> float:
    """Root mean square of what a rotation puts on the logits, relative to them."""
    exact = logits(base, rotation)
    return ((logits(base, rotated) - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.parametrize("base", BASES)
def test_bl_181_a_rotation_in_bfloat16_costs_percents_of_the_logits_and_one_in_float32_nothing(base: float) -> None:
    """NVIDIA/TransformerEngine#1245. Float32 is the only way here, so there is no option to forget."""
    assert error(base, tables_in(torch.float32)) < 1e-5
    assert 5e-3 < error(base, tables_in(torch.bfloat16)) < 5e-2
    assert error(base, angles_in_bfloat16) > 0.2


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_bl_181_a_model_in_low_precision_is_handed_float32_tables(base: float, compute: str) -> None:
    dtypes: list[torch.dtype] = []

    def watched(
        positions: torch.Tensor, frequency: Frequencies, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotation(positions, frequency, dtype)
        dtypes.extend((frequency.inverse.dtype, cos.dtype, sin.dtype))
        return cos, sin

    settings = {"precision.compute": compute, "model.rope_theta": base, "model.num_hidden_layers": 1}
    assembly = assembled(config_of({**TINY, **settings, "batch.global_size": 2}))
    with torch.no_grad(), patch.object(stage, "rotation", watched):
        assembly.evaluation.run(step_batch_of(assembly, text([64] * 2)[0], None))
    assert dtypes == [torch.float64, torch.float32, torch.float32]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("backward", [False, True])
def test_bl_181_bfloat16_heads_are_rotated_with_one_rounding_at_the_end(base: float, backward: bool) -> None:
    """Rounding to bfloat16's 8 bits moves a value by at most 2⁻⁸ of it; float32 inside adds some 2⁻²³ of the head."""
    model = config_of({"model.head_dim": 64, "model.rope_theta": base}).model
    positions = torch.arange(0, 100_000, 97).unsqueeze(1)
    x = torch.randn(len(positions), 1, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    frequency = inverse_frequencies(model)
    exact = reference.rotate(x.double(), *rotation(positions, frequency, torch.float64), backward=backward)
    bound = 2**-8 * exact.abs() + 2**-21 * x.double().abs().max()

    def beyond(dtype: torch.dtype) -> float:
        found = reference.rotate(x, *rotation(positions, frequency, dtype), backward=backward)
        assert found.dtype == torch.bfloat16
        return ((found.double() - exact).abs() > bound).double().mean().item()

    assert beyond(torch.float32) == 0
    assert beyond(torch.bfloat16) > 0.1  # or the bound would say nothing
