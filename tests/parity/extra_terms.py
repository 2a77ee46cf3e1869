"""A family whose stages return terms of their own: what an extra head or a router's balance loss does."""

from __future__ import annotations

from typing import Any

import torch

from ultrascale.models.batch import MicroBatch
from ultrascale.models.llama import Llama
from ultrascale.models.stage import Stage
from ultrascale.parallel.module import Build
from ultrascale.parallel.objective import Term
from ultrascale.parallel.passes import Pass


class ExtraStage(Stage):
    """Beside the hidden states, the sum of squares of what its layers with an even number give."""

    def forward(self, hidden: torch.Tensor | None, batch: MicroBatch, current: Pass) -> Any:
        squares: list[torch.Tensor] = []
        for name, block in zip(self.names, self.blocks, strict=True):
            if int(name.split(".")[1]) % 2 == 0:
                block.register_forward_hook(lambda module, args, out: squares.append(out.square().sum()))
        out = super().forward(hidden, batch, current)
        for block in self.blocks:
            block._forward_hooks.clear()
        if not squares:
            return out
        extra = {"extra": torch.stack(squares).sum()}
        return {**out, **extra} if isinstance(out, dict) else (out, extra)


class Extra(Llama):
    def terms(self) -> dict[str, Term]:
        return {**super().terms(), "extra": Term("rows", 0.01)}

    def stage(self, build: Build, layers: range, embedding: bool, head: bool) -> Stage:
        return ExtraStage(build, self.config, layers, embedding, head)
