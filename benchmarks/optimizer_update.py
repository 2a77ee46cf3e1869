"""Nanoseconds per element of one AdamW update on one core: ours, over flat memory, and the chain of tensor operations
that says the same.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_update.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ultrascale.optim.adamw import AdamW
from ultrascale.optim.groups import Rule
from ultrascale.optim.offload import Resident
from ultrascale.optim.segments import Segment, State
from ultrascale.parallel.buckets import Bucket

RULE = Rule("adamw", 1.0, 0.1, betas=(0.9, 0.95), eps=1e-8)
SIZES = [1 << power for power in (14, 16, 18, 20, 22, 24)]
CLIPPED = 0.5
"""Factor on the gradient: most steps of a run are clipped."""
ELEMENTS = 1 << 24
"""That are updated in one measurement, in so many updates."""
ROUNDS = 3


def chain(segment: Segment, state: State, step: int, lr: float, coefficient: float) -> None:
    """Adam's formulas one after another."""
    rule, master = segment.rule, segment.bucket.masters
    gradient = segment.bucket.gradients * coefficient
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(gradient, 1.0 - rule.betas[0])
    square.mul_(rule.betas[1]).addcmul_(gradient, gradient, value=1.0 - rule.betas[1])
    denominator = square.sqrt().div_((1.0 - rule.betas[1] ** step) ** 0.5).add_(rule.eps)
    master.mul_(1.0 - lr * rule.weight_decay)
    master.addcdiv_(mean, denominator, value=-lr / (1.0 - rule.betas[0] ** step))


def measured(update: Callable[..., None], numel: int, dtype: torch.dtype = torch.float32) -> float:
    """Nanoseconds per element, the best of some rounds."""
    bucket = Bucket(0, (), (), None, [], ())
    bucket.masters, bucket.gradients = torch.randn(numel), torch.randn(numel)
    segment = Segment(bucket, 0, numel, RULE)
    Resident(dtype, torch.device("cpu")).hold(segment, AdamW().state_names(segment))
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for step in range(1, ELEMENTS // numel + 1):
            update(segment, segment.state, step, 1e-3, CLIPPED)
        best = min(best, time.perf_counter() - begun)
    return best / ELEMENTS * 1e9


def main() -> None:
    print(f"{'elements':>10} {'chain':>8} {'ours':>8} {'ratio':>7} {'bfloat16 moments':>18}")
    for numel in SIZES:
        plain, ours = measured(chain, numel), measured(AdamW().update, numel)
        narrow = measured(AdamW().update, numel, torch.bfloat16)
        print(f"{numel:10d} {plain:8.2f} {ours:8.2f} {plain / ours:7.1f} {narrow:18.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
