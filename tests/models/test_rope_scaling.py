"""Rotary frequencies under every kind of scaling: against transformers' functions, and in the precision they need."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, pi
from typing import Any

import pytest
import torch
from their_rope import their_scaled

from small import assembled, config_of
from ultrascale.config.model_section import Model
from ultrascale.models.rope import inverse_frequencies, rotation

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

CASES: dict[str, tuple[int, float, Mapping[str, Any]]] = {
    "linear": (128, 1e4, LINEAR),
    "linear, not a whole factor": (64, 5e5, {**LINEAR, "factor": 2.5}),
    "yarn": (128, 1e4, YARN),
    "yarn, large base": (128, 1e6, {**YARN, "factor": 32.0, "original_max_position_embeddings": 32768}),
    "yarn, other betas": (96, 1e4, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn, not truncated": (128, 1.5e5, {**YARN, "truncate": False, "factor": 32.0}),
    "yarn, attention factor given": (64, 1e4, {**YARN, "attention_factor": 1.25}),
    "yarn of DeepSeek-V2": (64, 1e4, {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "yarn, two mscales": (64, 1e4, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "yarn, short context": (16, 1e4, {**YARN, "original_max_position_embeddings": 64}),
    "yarn, blend beyond the last pair": (16, 10.0, {**YARN, "beta_fast": 4096 / (2 * pi) - 1.0}),
    "yarn, blend without width": (16, 1e4, {**YARN, "beta_fast": 2.0, "truncate": False, "beta_slow": 2.0 - 1e-15}),
    "llama3": (128, 5e5, LLAMA3),
    "llama3, short context": (16, 5e5, {**LLAMA3, "original_max_position_embeddings": 64}),
}


def model(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Model:
    return config_of({"model.head_dim": head_dim, "model.rope_theta": theta, "model.rope_scaling": scaling}).model


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_factor_are_those_of_transformers(case: str) -> None:
    scaled = model(*CASES[case])
    ours = inverse_frequencies(scaled)
    theirs, factor = their_scaled(scaled)
    assert ours.inverse.dtype == theirs.dtype == torch.float64
    torch.testing.assert_close(ours.inverse, theirs, rtol=1e-13, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-15)
    # As it is, it computes in float32: a few roundings of 6e-8 each.
    narrow, factor = their_scaled(scaled, wide=False)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(ours.inverse.float(), narrow, rtol=2e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("case", [name for name, (_, _, scaling) in CASES.items() if scaling["rope_type"] != "linear"])
def test_a_scaling_keeps_fast_frequencies_divides_slow_ones_and_never_more(case: str) -> None:
    head_dim, theta, scaling = CASES[case]
    stretch = (
        inverse_frequencies(model(head_dim, theta, None)).inverse / inverse_frequencies(model(*CASES[case])).inverse
    )
    assert stretch[0] == pytest.approx(1.0, abs=1e-12)
    assert (stretch.diff() >= -1e-12).all()
    assert stretch.max() <= scaling["factor"] * (1 + 1e-12)
    assert stretch.max() > 1.01


def test_yarn_and_llama3_have_frequencies_of_all_three_kinds() -> None:
    """Or the comparison above says nothing about one branch of the rule."""
    for case in ("yarn", "llama3", "yarn, not truncated"):
        head_dim, theta, scaling = CASES[case]
        plain = inverse_frequencies(model(head_dim, theta, None)).inverse
        stretch = plain / inverse_frequencies(model(*CASES[case])).inverse
        assert ((stretch - 1).abs() < 1e-12).sum() > 1
        assert ((stretch - scaling["factor"]).abs() < 1e-12).sum() > 1
        assert ((stretch > 1.01) & (stretch < scaling["factor"] - 0.01)).any()


@pytest.mark.parametrize("scaling", [LINEAR, YARN, LLAMA3], ids=lambda scaling: scaling["rope_type"])
def test_a_factor_of_one_changes_nothing(scaling: Mapping[str, Any]) -> None:
    plain, scaled = (inverse_frequencies(model(64, 1e4, one)) for one in (None, {**scaling, "factor": 1.0}))
    torch.testing.assert_close(scaled.inverse, plain.inverse, rtol=1e-15, atol=0)
    assert scaled.attention_factor == plain.attention_factor == 1.0


def test_interpolation_gives_a_position_the_angles_of_a_nearer_one() -> None:
    """Position m under a factor of 4 is position m/4 without (Chen et al. 2023, eq. 4)."""
    far, near = torch.arange(0, 4096, 4).unsqueeze(1), torch.arange(1024).unsqueeze(1)
    for scaled, plain in zip(
        rotation(far, inverse_frequencies(model(64, 1e4, LINEAR)), torch.float64),
        rotation(near, inverse_frequencies(model(64, 1e4, None)), torch.float64),
        strict=True,
    ):
        assert torch.equal(scaled, plain)  # 4 is a power of two: nothing is rounded


def test_yarns_factor_multiplies_cos_and_sin() -> None:
    cos, sin = rotation(torch.arange(100).unsqueeze(1), inverse_frequencies(model(64, 1e4, YARN)), torch.float64)
    factor = 0.1 * log(4.0) + 1.0
    torch.testing.assert_close((cos.square() + sin.square()).sqrt(), torch.full_like(cos, factor), rtol=1e-14, atol=0)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_angles_are_exact_far_out_whatever_the_model_computes_in(compute: str) -> None:
    """In float32 the angle of position 10⁶ is off by hundredths, and a table in bfloat16 by everything."""
    config = config_of({"precision.compute": compute, "model.rope_scaling": YARN})
    (stage,) = assembled(config).stages.values()
    stage.to(torch.bfloat16)
    assert stage.frequency.inverse.dtype == torch.float64
    positions = torch.tensor([[1_000_003]])
    angle = 1_000_003 * inverse_frequencies(config.model).inverse
    cos, sin = rotation(positions, stage.frequency, torch.float32)
    factor = 0.1 * log(4.0) + 1.0
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos.flatten(), (factor * angle.cos()).float())
    assert torch.equal(sin.flatten(), (factor * angle.sin()).float())
