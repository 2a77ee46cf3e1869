"""The frequencies of transformers' own functions, which narrow to float32 inside: here with every float32 widened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import modeling_rope_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ultrascale.config.model_section import Model

WIDE = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("arange", "clamp", "where", "int64")},
    float=torch.float64,
    float32=torch.float64,
)


def their_config(model: Model, kind: Any = transformers.LlamaConfig, **more: Any) -> Any:
    """transformers' config with the positions of this model."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        rope |= model.rope_scaling.model_dump()
    return kind(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters=rope,
        **more,
    )


def their_scaled(model: Model, wide: bool = True) -> tuple[torch.Tensor, float]:
    """(inverse frequencies, factor on cos and sin) of a scaling that transformers has, in float64 or as it is."""
    assert model.rope_scaling is not None
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr(modeling_rope_utils, "torch", WIDE)
        return ROPE_INIT_FUNCTIONS[model.rope_scaling.rope_type](their_config(model), None)
