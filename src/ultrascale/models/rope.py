"""Rotary positions, with the frequency scaling of Llama 3.1."""

from __future__ import annotations

from math import pi

import torch

from ultrascale.config.schema import Model


def inverse_frequencies(model: Model) -> torch.Tensor:
    """float64 [head_dim / 2]: θ^(−2i/d), scaled for long context when `model.rope_scaling` says so.

    Llama-3 scaling (Llama 3.1 model code; Grattafiori et al. 2024, §3.4): wavelengths above
    original_length / low_freq_factor are stretched by `factor`, those below original_length / high_freq_factor are
    left, and between the two the stretch is interpolated in the frequency.
    """
    assert model.head_dim is not None
    exponent = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    frequency = 1.0 / model.rope_theta**exponent
    scaling = model.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2.0 * pi / frequency
    turns = scaling.original_max_position_embeddings / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequency * (blend + (1.0 - blend) / scaling.factor)


def rotation(positions: torch.Tensor, frequency: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [seq, batch, 1, head_dim / 2] in `dtype` of positions int64 [seq, batch]; angles in float64."""
    angle = positions.unsqueeze(-1).to(torch.float64) * frequency.to(positions.device)
    return angle.cos().to(dtype).unsqueeze(2), angle.sin().to(dtype).unsqueeze(2)
