"""Learning rate as a pure function of the step and of `schedule.*`; how long the run goes on plays no part."""

from __future__ import annotations

import math

from ultrascale.config.schema import Config


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Warm-up is linear and reaches the peak at step `warmup_steps` (so step 1 already moves). Then
    constant: the peak; linear and cosine: to `min_lr` at `total_steps`, flat after it;
    wsd: the peak, and over the last `decay_steps` before `total_steps` linearly to `min_lr`
    (warm-up, stable, decay: Hu et al. 2024, MiniCPM).
    """
    peak, plan = config.optimizer.lr, config.schedule
    if step <= plan.warmup_steps:
        return peak * step / plan.warmup_steps
    if plan.name == "constant":
        return peak
    assert plan.total_steps is not None
    begin = plan.warmup_steps
    if plan.name == "wsd":
        assert plan.decay_steps is not None
        begin = plan.total_steps - plan.decay_steps
    progress = min(1.0, max(0.0, (step - begin) / max(1, plan.total_steps - begin)))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if plan.name == "cosine" else 1.0 - progress
    return plan.min_lr + (peak - plan.min_lr) * remaining
