"""Optimizers over the flat masters of the buckets, and clipping by the one global norm.

State is flat like the masters; its elements are named through the buckets' spans, so that a checkpoint stores moments
per logical parameter. Building an optimizer changes no parameter and makes no step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ultrascale.config.schema import Config
from ultrascale.parallel.buckets import Bucket, Span, runs
from ultrascale.parallel.gradients import Gradients


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring elements [start, stop) of a bucket with one decay and learning-rate class."""

    bucket: Bucket
    start: int
    stop: int
    decay: bool
    lr_scale: float


def segments(buckets: list[Bucket]) -> Iterator[Segment]:
    """The classes of every bucket, in order."""
    for bucket in buckets:
        for decay, lr_scale in dict.fromkeys(_class(span) for span in bucket.spans):
            same = partial(_is_of, (decay, lr_scale))
            for start, stop in runs(bucket.spans, same):
                yield Segment(bucket, start, stop, decay, lr_scale)


def _class(span: Span) -> tuple[bool, float]:
    return span.layout.decay, span.layout.lr_scale


def _is_of(wanted: tuple[bool, float], span: Span) -> bool:
    return _class(span) == wanted


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Factor that brings a gradient of this norm down to `max_norm`; 1 when it is within or no bound is set."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class Optimizer(ABC):
    """Base: which state an optimizer has, and one update over one segment."""

    state_names: tuple[str, ...] = ()

    def __init__(self, gradients: Gradients, weight_decay: float) -> None:
        self.gradients = gradients
        self.weight_decay = weight_decay
        self.segments = list(segments(gradients.buckets))
        self.state = [
            {name: torch.zeros_like(bucket.masters) for name in self.state_names} for bucket in gradients.buckets
        ]
        self._state_of = {id(b): s for b, s in zip(gradients.buckets, self.state, strict=True)}

    @torch.no_grad()
    def step(self, step: int, lr: float, coefficient: float) -> None:
        """Optimizer step number `step` (from 1) with gradients scaled by `coefficient` (clipping)."""
        for segment in self.segments:
            part = slice(segment.start, segment.stop)
            bucket = segment.bucket
            gradient = bucket.gradients[part].to(bucket.masters.dtype)
            if coefficient != 1.0:
                gradient = gradient * coefficient
            state = {name: tensor[part] for name, tensor in self._state_of[id(bucket)].items()}
            decay = self.weight_decay if segment.decay else 0.0
            self.update(bucket.masters[part], gradient, state, step, lr * segment.lr_scale, decay)
        self.gradients.publish()

    @abstractmethod
    def update(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Updates `master` and `state` in place; `gradient` must be left alone."""


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, alg. 2, decay scaled by the learning rate)."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, gradients: Gradients, weight_decay: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(gradients, weight_decay)
        self.betas, self.eps = betas, eps

    def update(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        beta1, beta2 = self.betas
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        denominator = exp_avg_sq.sqrt().div_((1.0 - beta2**step) ** 0.5).add_(self.eps)
        if weight_decay:
            master.mul_(1.0 - lr * weight_decay)
        master.addcdiv_(exp_avg, denominator, value=-lr / (1.0 - beta1**step))


class SGD(Optimizer):
    """Gradient descent, with momentum when asked (v ← μ·v + g; w ← w − lr·v) and decay coupled to the gradient."""

    def __init__(self, gradients: Gradients, weight_decay: float, momentum: float) -> None:
        self.momentum = momentum
        self.state_names = ("momentum",) if momentum else ()
        super().__init__(gradients, weight_decay)

    def update(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        if weight_decay:
            gradient = gradient.add(master, alpha=weight_decay)
        if self.momentum:
            gradient = state["momentum"].mul_(self.momentum).add_(gradient)
        master.sub_(gradient, alpha=lr)


def make_optimizer(config: Config, gradients: Gradients) -> Optimizer:
    """The optimizer that `optimizer.name` names."""
    settings = config.optimizer
    if settings.name == "adamw":
        return AdamW(gradients, settings.weight_decay, settings.betas, settings.eps)
    if settings.name == "sgd":
        return SGD(gradients, settings.weight_decay, settings.momentum)
    raise ValueError(f"optimizer.name={settings.name} is not in this version; use adamw or sgd")
