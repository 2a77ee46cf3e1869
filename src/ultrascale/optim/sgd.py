"""Gradient descent."""

from __future__ import annotations

import torch

from ultrascale.optim.algorithm import Elementwise
from ultrascale.optim.groups import Rule
from ultrascale.optim.segments import Segment, State


class SGD(Elementwise):
    """Gradient descent, with momentum when asked (v ← μ·v + g; w ← w − lr·v) and decay coupled to the gradient."""

    def state_names(self, segment: Segment) -> tuple[str, ...]:
        return ("momentum",) if segment.rule.momentum else ()

    def update_flat(
        self, master: torch.Tensor, gradient: torch.Tensor, state: State, rule: Rule, step: int, lr: float
    ) -> None:
        if rule.weight_decay:
            gradient = gradient.add(master, alpha=rule.weight_decay)
        if rule.momentum:
            gradient = state["momentum"].mul_(rule.momentum).add_(gradient)
        master.sub_(gradient, alpha=lr)
