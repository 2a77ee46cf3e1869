"""What an optimizer's algorithm is: the state it holds, and its update of one segment of flat memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ultrascale.optim.groups import Rule
from ultrascale.optim.segments import Segment, State, pieces


class Algorithm(ABC):
    """One way to update. In a step every segment comes to `update`, then `exchange` and `finish` are called once."""

    @abstractmethod
    def state_names(self, segment: Segment) -> tuple[str, ...]:
        """Moments that the segment needs, each of the size of the segment, zeros at first."""

    @abstractmethod
    def update(self, segment: Segment, state: State, step: int, lr: float, coefficient: float) -> None:
        """Updates masters and state in place, or begins to; gradients are left alone.

        state         on the device
        step          from 1
        lr            of the step, without the rule's factor
        coefficient   factor on the gradient
        """

    @abstractmethod
    def exchange(self) -> None:
        """After the last segment: sends what other ranks need. All ranks call it, also those without a segment."""

    @abstractmethod
    def finish(self, lr: float) -> None:
        """After all algorithms' segments: awaits other ranks, and does what is left."""


class Elementwise(Algorithm):
    """An element's update depends on nothing but the element: any piece of flat memory will do."""

    def update(self, segment: Segment, state: State, step: int, lr: float, coefficient: float) -> None:
        rule = segment.rule
        for piece in pieces(segment, state, coefficient):
            self.update_flat(piece.master, piece.gradient, piece.state, rule, step, lr * rule.lr_scale)

    def exchange(self) -> None:
        return  # no rank needs another

    def finish(self, lr: float) -> None:
        return  # nothing is left

    @abstractmethod
    def update_flat(
        self, master: torch.Tensor, gradient: torch.Tensor, state: State, rule: Rule, step: int, lr: float
    ) -> None:
        """Updates master and state, [n] elements in the dtype of the masters; `lr` with the rule's factor."""
