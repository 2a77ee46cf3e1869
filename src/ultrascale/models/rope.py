"""Rotary positions, and what is done to their frequencies for contexts longer than those first trained on.

Frequencies and angles are float64 whatever the model computes in: at position 100 000 a float32 angle is off by
up to 0.007, and a bfloat16 one by many turns. They are no buffers, so that no `.to(bfloat16)` of a module reaches them.
"""

from __future__ import annotations

from math import pi
from typing import NamedTuple

import torch

from ultrascale.config.model_section import LinearScaling, Llama3Scaling, Model, YarnScaling
from ultrascale.models import yarn
from ultrascale.models.sizes import rotary_dim


class Frequencies(NamedTuple):
    """What decides the rotation at a position."""

    inverse: torch.Tensor
    """float64 [rotary_dim / 2]: radians per position of each pair of features."""
    attention_factor: float
    """Multiplies cos and sin."""


def inverse_frequencies(model: Model) -> Frequencies:
    """θ^(−2i/d) (Su et al. 2021), scaled for long context when `model.rope_scaling` says so."""
    dim = rotary_dim(model)
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequency, scaling = 1.0 / model.rope_theta**exponent, model.rope_scaling
    if isinstance(scaling, LinearScaling):
        # Position interpolation (Chen et al. 2023, §2.3): m/factor in place of m is the same product.
        return Frequencies(frequency / scaling.factor, 1.0)
    if isinstance(scaling, YarnScaling):
        return Frequencies(_yarn(frequency, scaling, model.rope_theta), yarn.attention_factor(scaling))
    if isinstance(scaling, Llama3Scaling):
        return Frequencies(_llama3(frequency, scaling), 1.0)
    return Frequencies(frequency, 1.0)


def _yarn(frequency: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """NTK-by-parts (Peng et al. 2023, §3.2): frequencies that turn more than beta_fast times in the original context
    are kept, those below beta_slow divided by `factor`, and between the two the blend is linear in the pair."""
    kept, divided = yarn.blended_pairs(scaling, theta, 2 * len(frequency))
    pair = torch.arange(len(frequency), dtype=torch.float64)
    # A blend without width is a step: the published code widens it by a thousandth of a pair, and so do we.
    share = ((pair - kept) / (divided - kept if divided != kept else 0.001)).clamp(0.0, 1.0)
    return frequency * (share / scaling.factor + (1.0 - share))


def _llama3(frequency: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Wavelengths above original_length / low_freq_factor are stretched by `factor`, those below original_length /
    high_freq_factor are left, and between the two the stretch is interpolated in the frequency (Llama 3.1 model code;
    Grattafiori et al. 2024, §3.4)."""
    turns = scaling.original_max_position_embeddings * frequency / (2.0 * pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequency * (blend + (1.0 - blend) / scaling.factor)


def rotation(positions: torch.Tensor, frequency: Frequencies, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [seq, batch, 1, rotary_dim / 2] in `dtype` of positions int64 [seq, batch], times the attention
    factor; rounded once, at the end."""
    angle = positions.unsqueeze(-1).to(torch.float64) * frequency.inverse.to(positions.device)
    cos, sin = (frequency.attention_factor * part for part in (angle.cos(), angle.sin()))
    return cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2)
