"""Which parameter is updated how: `optimizer.*`, and over it the first of `optimizer.groups` that matches.

Resolved once, from layouts and config alone, so that every rank comes to the same answer. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from ultrascale.config.problem import ConfigError, Problem, choices
from ultrascale.config.schema import Optimizer, ParameterGroup
from ultrascale.parallel.layout import Kind, Layout

DEFAULT_MOMENTUM = {"muon": 0.95, "sgd": 0.0}


@dataclass(frozen=True, slots=True)
class Rule:
    """How a parameter is updated. Settings that its optimizer does not read are 0, so that equal rules are equal."""

    optimizer: str
    """adamw | sgd | muon"""
    lr_scale: float
    """Factor on the learning rate of the step."""
    weight_decay: float
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    momentum: float = 0.0


def uses(settings: Optimizer, name: str) -> bool:
    """Whether any parameter may be updated by the optimizer of this name."""
    under = {settings.name, "adamw"} if settings.name == "muon" else {settings.name}
    return name in {*under, *(group.optimizer for group in settings.groups)}


def group_of(layout: Layout, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """The first group that matches a parameter, by any of its names when it is tied."""
    return next((group for group in groups if _matches(group, layout)), None)


def _matches(group: ParameterGroup, layout: Layout) -> bool:
    if group.match is None:
        return group.kind == layout.kind.value
    names = layout.tie.names if layout.tie else (layout.name,)
    return any(fnmatchcase(name, group.match) for name in names)


def rule_of(layout: Layout, settings: Optimizer) -> Rule:
    """How `layout` is updated under `optimizer.*`."""
    group = group_of(layout, settings.groups) or ParameterGroup()
    name = group.optimizer or settings.name
    if name == "muon" and group.optimizer is None and layout.kind is not Kind.MATRIX:
        name = "adamw"
    decay = settings.weight_decay if layout.decay else 0.0
    lr_scale = layout.lr_scale * (1.0 if group.lr_scale is None else group.lr_scale)
    weight_decay = decay if group.weight_decay is None else group.weight_decay
    if name == "adamw":
        betas = group.betas or settings.betas
        return Rule(name, lr_scale, weight_decay, betas=betas, eps=group.eps or settings.eps)
    given = settings.momentum if group.momentum is None else group.momentum
    momentum = DEFAULT_MOMENTUM[name] if given is None else given
    return Rule(name, lr_scale, weight_decay, momentum=momentum)


def check_groups(settings: Optimizer, layouts: Sequence[Layout]) -> None:
    """Every group holds for some parameter, and Muon only for matrices; `layouts` are the whole model's.

    Raises ConfigError that names the group and what it could have meant.
    """
    problems = [*_groups_without_parameters(settings, layouts), *_muon_without_matrices(settings, layouts)]
    if problems:
        raise ConfigError(problems)


def _groups_without_parameters(settings: Optimizer, layouts: Sequence[Layout]) -> Iterator[Problem]:
    held = {id(group_of(layout, settings.groups)) for layout in layouts}
    for number, group in enumerate(settings.groups):
        if id(group) in held:
            continue
        key = f"optimizer.groups[{number}].{'match' if group.match else 'kind'}"
        meant = f"{key}={group.match or group.kind}"
        wanted = [layout for layout in layouts if _matches(group, layout)]
        if wanted:
            first = group_of(wanted[0], settings.groups)
            before = next(n for n, other in enumerate(settings.groups) if other is first)
            yield Problem(
                key,
                f"{meant} holds for no parameter: optimizer.groups[{before}] comes first for {wanted[0].name}; "
                "put the narrower group first, or leave this one out",
            )
        elif group.match is None:
            there = choices(sorted({layout.kind.value for layout in layouts}))
            yield Problem(key, f"{meant}: this model has no such parameter; use {there}")
        else:
            nearest = choices(_nearest(group.match, layouts))
            yield Problem(key, f"{meant} matches no parameter; the nearest are {nearest}")


def _nearest(pattern: str, layouts: Sequence[Layout]) -> list[str]:
    """Patterns of logical names that look most like this one, with layers and experts as `*`."""
    names = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layout.name) for layout in layouts)
    return get_close_matches(pattern, names, n=3, cutoff=0.0)


def _muon_without_matrices(settings: Optimizer, layouts: Sequence[Layout]) -> Iterator[Problem]:
    told: set[int] = set()
    for layout in layouts:
        group = group_of(layout, settings.groups)
        if rule_of(layout, settings).optimizer != "muon" or len(layout.shape) in (2, 3):
            continue
        number = next((n for n, other in enumerate(settings.groups) if other is group), -1)
        if number in told:
            continue
        told.add(number)
        key = "optimizer.name" if number < 0 else f"optimizer.groups[{number}].optimizer"
        yield Problem(
            key,
            f"{key}=muon takes matrices [out, in] or stacks of them, and {layout.name} has the shape "
            f"{list(layout.shape)}; give it a group with optimizer: adamw",
        )
