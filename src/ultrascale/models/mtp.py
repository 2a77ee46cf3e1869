"""Multi-token prediction: layers behind the last that predict tokens further ahead (DeepSeek-AI 2024, V3, §2.2).

    embedding of the token d ahead ─norm─┐
    hidden states of depth d − 1 ────norm─┴projection→ one layer → norm → the model's head: the token d + 1 ahead

Embedding and head are the model's own. Every depth reads what the head before it projects, the final norm's output,
as the published weights are used. Its loss is one more term, divided by the number of targets at its depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ultrascale.config.model_section import Model
from ultrascale.models.head import Head, embedding
from ultrascale.models.sizes import layer_name
from ultrascale.models.transformer import norm_weight, replicated_matrix
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.tensor import ReplicatedLinear, RMSNorm


class FurtherToken(Module):
    """One depth.

    depth       from 0: predicts from each position the token depth + 2 ahead
    block       makes its layer from (build, model, index); indices go on where the decoder's end
    head        the model's
    embedding   a module of this stage that has the embedding's weight, if there is one
    """

    def __init__(
        self,
        build: Build,
        model: Model,
        depth: int,
        block: Callable[[Build, Model, int], nn.Module],
        head: Head,
        owner: Module | None,
    ) -> None:
        super().__init__(build)
        index, hidden, eps = model.num_hidden_layers + depth, model.hidden_size, model.rms_norm_eps
        self.name = layer_name(model, index)
        self.term = term(depth)
        self.embedding = embedding(build, model, owner)
        self.embedding_norm = RMSNorm(build, norm_weight(f"{self.name}.enorm.weight", hidden, build), eps)
        self.hidden_norm = RMSNorm(build, norm_weight(f"{self.name}.hnorm.weight", hidden, build), eps)
        # Whole on every tp rank: under sequence parallelism each works on its own tokens, and nothing is sent.
        self.projection = ReplicatedLinear(
            build, replicated_matrix(f"{self.name}.eh_proj.weight", hidden, 2 * hidden, build, model.initializer_range)
        )
        self.layer = block(build, model, index)
        self.head = Head(build, model, f"{self.name}.norm.weight", head)

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor, current: Pass
    ) -> dict[str, torch.Tensor]:
        """The depth's term, with the layer's own and the hidden states that the next depth reads beside it.

        x        [seq (/ tp), batch, hidden], what the head before this depth projects
        ids      int64 [seq, batch], the token depth + 1 ahead of each position
        labels   int64 [seq, batch], the one behind it
        """
        if self.build.recompute == "full" and current.sink is not None:
            out: Any = checkpoint(self._mix, x, ids, current, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._mix(x, ids, current)
        terms = out if isinstance(out, dict) else {"hidden": out}
        sums = self.head(terms["hidden"], labels, current)
        return {**terms, self.term: sums["lm"], "hidden": sums["hidden"]}

    def _mix(self, x: torch.Tensor, ids: torch.Tensor, current: Pass) -> Any:
        """What the layer makes of both, as it returns it."""
        token = self.embedding_norm(self.embedding(ids, current), current)
        both = torch.cat((token, self.hidden_norm(x, current)), dim=-1)
        return self.layer(self.projection(both, current), current)


def term(depth: int) -> str:
    """The objective's name for a depth's loss, from mtp_1."""
    return f"mtp_{depth + 1}"


def targets(depth: int) -> str:
    """The count of targets that it is divided by."""
    return f"targets_{term(depth)}"
