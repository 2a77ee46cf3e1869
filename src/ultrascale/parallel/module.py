"""Modules whose parameters cannot exist without a layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ultrascale.comm.group import Group
from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.context.attention import ContextAttention
from ultrascale.parallel.experts.dispatch import ExpertGroups
from ultrascale.parallel.layout import Layout, Stored
from ultrascale.precision.policy import Policy


@dataclass(frozen=True)
class Build:
    """What layers are built with: this rank's place on the mesh, its tensor group, and the run's choices."""

    mesh: Mesh
    rank: int
    tensor_group: Group
    sequence_parallel: bool
    policy: Policy
    recompute: str
    """none | selective | full"""
    attention: ContextAttention
    """Over the tokens of all cp ranks."""
    experts: ExpertGroups | None = None
    """None: the model has none."""

    @property
    def tp(self) -> int:
        return self.tensor_group.size


class Module(nn.Module):
    """An `nn.Module` whose parameters are declared with their layouts, on the meta device.

    `Gradients.materialise` gives them memory: views of flat buckets. `current` is handed down as an argument, never
    kept: the same module runs many passes at once under a pipeline.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        self.stored: dict[str, Stored] = {}
        self.kept: dict[str, Layout] = {}
        """Buffers that are state of the run: saved, loaded, equal on all ranks, and no business of the optimizer."""

    def declare(self, name: str, *members: Layout) -> None:
        """Registers one stored tensor made of `members`, in this order along dim 0."""
        stored = Stored(members)
        self.stored[name] = stored
        shape = stored.local_shape(self.build.mesh)
        self._put(name, nn.Parameter(torch.empty(shape, dtype=self.build.policy.compute, device="meta")))

    def keep(self, name: str, layout: Layout) -> None:
        """Registers a buffer that is state of the run, in wide precision for ever, whatever the compute dtype."""
        self.kept[name] = layout
        shape = layout.local_shape(self.build.mesh)
        self.register_buffer(name, torch.empty(shape, dtype=self.build.policy.master, device="meta"))

    def share(self, name: str, owner: Module, owner_name: str) -> None:
        """Uses another module's parameter: one tensor, one layout, two uses whose gradients add up."""
        layout = owner.stored[owner_name].members[0]
        if layout.tie is None:
            raise ValueError(f"{layout.name} is used twice but its layout says no tie")
        self.stored[name] = owner.stored[owner_name]
        self._put(name, getattr(owner, owner_name))

    def replace(self, parameters: dict[str, nn.Parameter]) -> None:
        """Puts real tensors in place of those on the meta device."""
        for name, parameter in parameters.items():
            self._put(name, parameter)

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        super().register_parameter(name, parameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        raise TypeError(
            f"{type(self).__name__}.{name}: a parameter needs a Layout; declare it with self.declare(name, Layout(...))"
        )


@dataclass(frozen=True)
class Entry:
    """One stored tensor of a stage, in order of first use."""

    module: Module
    attribute: str
    parameter: nn.Parameter
    stored: Stored
    units: tuple[str, ...]
    """Of this stage, that use it, in order."""


def stored_tensors(units: list[tuple[str, nn.Module]]) -> list[Entry]:
    """Every stored tensor of a stage once, in order of first use; a bare parameter in a foreign module is refused."""
    entries: dict[int, Entry] = {}
    for unit, root in units:
        for path, module in root.named_modules():
            declared = module.stored if isinstance(module, Module) else {}
            for attribute, parameter in module.named_parameters(recurse=False):
                if attribute not in declared:
                    raise TypeError(f"{unit}.{path}.{attribute} has no Layout; build it in an ultrascale Module")
                assert isinstance(module, Module)
                known = entries.get(id(parameter))
                if known is None:
                    entries[id(parameter)] = Entry(module, attribute, parameter, declared[attribute], (unit,))
                elif unit not in known.units:
                    entries[id(parameter)] = replace(known, units=(*known.units, unit))
    return list(entries.values())
