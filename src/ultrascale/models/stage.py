"""A pipeline stage: the run of layers, with what stands before the first and behind the last."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ultrascale.config.model_section import Model
from ultrascale.config.schema import Config
from ultrascale.models.batch import MicroBatch
from ultrascale.models.head import Head, embedding
from ultrascale.models.mtp import FurtherToken
from ultrascale.models.rope import inverse_frequencies, rotation
from ultrascale.models.sizes import layer_name
from ultrascale.models.transformer import Block
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass, run_unit
from ultrascale.precision.policy import wide

Terms = dict[str, torch.Tensor]


class Stage(Module):
    """A run of layers, with the embedding before it or the head behind it where the partition puts them.

    layers     indices of this stage's blocks, global; may be empty
    block      makes a block from (build, model, index)
    """

    def __init__(
        self,
        build: Build,
        config: Config,
        layers: range,
        has_embedding: bool,
        has_head: bool,
        block: Callable[[Build, Model, int], nn.Module] = Block,
    ) -> None:
        super().__init__(build)
        model = config.model
        self.embedding = embedding(build, model) if has_embedding else None
        self.blocks = nn.ModuleList(block(build, model, index) for index in layers)
        self.names = [layer_name(model, index) for index in layers]
        tied = self.embedding if model.tie_word_embeddings else None
        self.head = Head(build, model, owner=tied) if has_head else None
        self.further = nn.ModuleList()
        if self.head is not None:
            owner: Module | None = self.head if model.tie_word_embeddings else self.embedding
            for depth in range(model.num_nextn_predict_layers):
                module = FurtherToken(build, model, depth, block, self.head, owner)
                owner = owner or module.embedding
                self.further.append(module)
        self.further_names = [module.name for module in self._further()]
        self.frequency = inverse_frequencies(model)

    def _further(self) -> list[FurtherToken]:
        return [module for module in self.further if isinstance(module, FurtherToken)]

    def units(self) -> list[tuple[str, nn.Module]]:
        """(name, module) in order of use: what is reduced, gathered and freed together."""
        units: list[tuple[str, nn.Module]] = []
        if self.embedding is not None:
            units.append(("embedding", self.embedding))
        units += zip(self.names, self.blocks, strict=True)
        if self.head is not None:
            units.append(("head", self.head))
        units += zip(self.further_names, self.further, strict=True)
        return units

    def forward(
        self, hidden: torch.Tensor | None, batch: MicroBatch, current: Pass
    ) -> torch.Tensor | tuple[torch.Tensor, Terms] | Terms:
        """One micro-batch through the stage.

        hidden   [seq (/ tp), batch, hidden] from the stage before; None for the first
        returns  the same for the stage behind, with {term: sum} where blocks have terms; from the last, {term: sum}
                 or, without labels, {"logits": …}
        """
        if self.embedding is not None:
            x = run_unit("embedding", self.embedding, current, batch.inputs)
        else:
            assert hidden is not None
            x = hidden
        if (len(self.blocks) or len(self.further)) and current.rotation is None:
            current.rotation = rotation(batch.positions, self.frequency, wide(x.dtype))
            current.documents = batch.documents
            if batch.padding is not None:
                current.real, current.lengths = batch.padding.real, batch.padding.lengths
        terms: Terms = {}
        for name, block in zip(self.names, self.blocks, strict=True):
            out = run_unit(name, block, current, x, recompute=self.build.recompute == "full")
            x = _add_up(terms, out) if isinstance(out, dict) else out
        if self.head is None:
            return (x, terms) if terms else x
        if not batch.labels:
            return {"logits": run_unit("head", self.head.logits, current, x)}
        return self._predict(x, batch, current, terms)

    def _predict(self, x: torch.Tensor, batch: MicroBatch, current: Pass, terms: Terms) -> Terms:
        """From the last layer's output to the terms of the next token, and of those behind it."""
        assert self.head is not None
        out = run_unit("head", self.head, current, x, batch.labels[0])
        if not len(self.further):
            return {**terms, **out}
        x = _add_up(terms, out)
        for module, ids, labels in zip(self._further(), batch.further_inputs, batch.labels[1:], strict=True):
            x = _add_up(terms, run_unit(module.name, module, current, x, ids, labels))
        return terms


def _add_up(terms: Terms, out: Terms) -> torch.Tensor:
    """Adds a unit's terms to those before it; returns its hidden states."""
    for name, value in out.items():
        if name != "hidden":
            terms[name] = terms[name] + value if name in terms else value
    return out["hidden"]
