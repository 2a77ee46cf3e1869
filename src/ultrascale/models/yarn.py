"""YaRN's two numbers beside the frequencies themselves: which pairs of features are stretched, and how much attention
is sharpened. Needs no torch (Peng et al. 2023, YaRN: Efficient Context Window Extension of Large Language Models, §3).
"""

from __future__ import annotations

from math import ceil, floor, log, pi

from ultrascale.config.model_section import YarnScaling


def pair_with_turns(turns: float, scaling: YarnScaling, theta: float, head_dim: int) -> float:
    """The pair i, in general between two whole ones, whose frequency θ^(−2i/d) turns this often in the original
    context; §3.2, solved for i."""
    return head_dim * log(scaling.original_max_position_embeddings / (turns * 2.0 * pi)) / (2.0 * log(theta))


def blended_pairs(scaling: YarnScaling, theta: float, head_dim: int) -> tuple[float, float]:
    """(last pair that is kept, first pair that is divided by the whole factor); linear in i between them.

    The upper bound is capped at d − 1 and not at d/2 − 1: so do the published code and transformers, and it decides the
    slope of the blend.
    """
    kept = pair_with_turns(scaling.beta_fast, scaling, theta, head_dim)
    divided = pair_with_turns(scaling.beta_slow, scaling, theta, head_dim)
    if scaling.truncate:
        kept, divided = floor(kept), ceil(divided)
    return max(kept, 0.0), min(divided, head_dim - 1.0)


def attention_factor(scaling: YarnScaling) -> float:
    """What cos and sin are multiplied by: √(1/t) = 0.1 · ln(factor) + 1 of §3.4; the logits of attention by its square.

    With mscale and mscale_all_dim the ratio of two such terms, as in DeepSeek-V2 and V3, whose attention has the other
    part of the sharpening (`softmax_factor`).
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _sharpening(scaling.factor, scaling.mscale) / _sharpening(scaling.factor, scaling.mscale_all_dim)
    return _sharpening(scaling.factor, 1.0)


def softmax_factor(scaling: YarnScaling) -> float:
    """What latent attention multiplies its softmax scale by: the square of the denominator in `attention_factor`.

    Only a part of its heads is rotated, and cos and sin alone would not sharpen the rest of them.
    """
    return 1.0 if scaling.mscale_all_dim is None else _sharpening(scaling.factor, scaling.mscale_all_dim) ** 2


def _sharpening(factor: float, weight: float) -> float:
    return 0.1 * weight * log(factor) + 1.0
