"""AdamW."""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw

from ultrascale.optim.algorithm import Elementwise
from ultrascale.optim.groups import Rule
from ultrascale.optim.segments import Segment, State


class AdamW(Elementwise):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, alg. 2, decay scaled by the learning rate).

    torch's fused kernel: one pass over flat memory. On a CPU core two to five times as fast as the chain of tensor
    operations it stands for, from a quarter of a million elements on; slower by its call's 30 µs for a few thousand
    (benchmarks/optimizer_update.py). Its roundings are its own: the last bit of a weight, against the chain.
    """

    def state_names(self, segment: Segment) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def update_flat(
        self, master: torch.Tensor, gradient: torch.Tensor, state: State, rule: Rule, step: int, lr: float
    ) -> None:
        # torch counts the step itself, on the tensor's device.
        before = torch.full((), float(step - 1), dtype=torch.float32, device=master.device)
        adamw(
            [master],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [before],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            lr=lr,
            weight_decay=rule.weight_decay,
            eps=rule.eps,
        )
