"""The two ends of a model, embedding and head, and what of them is one parameter that several modules use."""

from __future__ import annotations

import torch

from ultrascale.config.model_section import Model
from ultrascale.models.sizes import tied
from ultrascale.models.transformer import norm_weight
from ultrascale.parallel.cross_entropy import VocabularyShard, head_loss
from ultrascale.parallel.layout import Kind, Layout, Normal, Tie, Use
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.tensor import RMSNorm, VocabParallelEmbedding, column_parallel
from ultrascale.precision.policy import wide

VOCABULARY_MULTIPLE = 128
"""Rows of embedding and head are padded in memory to this multiple, whatever tp is."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def vocabulary_matrix(name: str, model: Model) -> Layout:
    """EMBEDDING or HEAD, or both in one: one row per token id, cut over tp."""
    tie = next((Tie(group, names) for group, names in tied(model).items() if name in names), None)
    return Layout(
        name=name if tie is None else tie.names[0],
        shape=(model.vocab_size, model.hidden_size),
        split={0: ("tp",)},
        used_in=Use.FEATURES,
        tie=tie,
        init=Normal(model.initializer_range),
        decay=True,
        lr_scale=1.0,
        pad_to={0: VOCABULARY_MULTIPLE},
        kind=Kind.EMBEDDING if name == EMBEDDING or model.tie_word_embeddings else Kind.HEAD,
    )


def embedding(build: Build, model: Model, owner: Module | None = None) -> VocabParallelEmbedding:
    """The look-up of token ids.

    owner   a module of this stage that has the embedding's weight, if there is one
    """
    return VocabParallelEmbedding(build, vocabulary_matrix(EMBEDDING, model), owner)


class Head(Module):
    """Norm and projection onto the vocabulary, as loss sums or as logits.

    norm    logical name of the norm's weight
    owner   a module of this stage that has the projection's weight, if there is one
    """

    weight: torch.Tensor

    def __init__(self, build: Build, model: Model, norm: str = "norm.weight", owner: Module | None = None) -> None:
        super().__init__(build)
        self.norm = RMSNorm(build, norm_weight(norm, model.hidden_size, build), model.rms_norm_eps)
        layout = vocabulary_matrix(HEAD, model)
        if owner is None:
            self.declare("weight", layout)
        else:
            self.share("weight", owner, "weight")
        offset, shape = layout.box(build.mesh, build.rank)
        self.shard = VocabularyShard(start=offset[0], valid=shape[0], total=model.vocab_size)
        self.smoothing = model.label_smoothing
        self.read_on = model.num_nextn_predict_layers > 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor, current: Pass) -> dict[str, torch.Tensor]:
        """x [seq (/ tp), batch, hidden], labels [seq, batch] → sums over the positions with a target.

        Beside them, where further tokens are predicted from it, "hidden": what was projected, like x.
        """
        build = self.build
        normed = self.norm(x, current)
        loss_sum, z_sum = head_loss(
            normed,
            self.weight,
            labels,
            self.shard,
            # An evaluation asks how well the text is predicted, whatever training aims at.
            self.smoothing if current.sink is not None else 0.0,
            build.tensor_group,
            build.sequence_parallel,
            current,
        )
        sums = {"lm": loss_sum, "z": z_sum}
        return {**sums, "hidden": normed} if self.read_on else sums

    def logits(self, x: torch.Tensor, current: Pass) -> torch.Tensor:
        """[seq, batch, vocabulary of this rank], padding cut off, in wide precision."""
        build = self.build
        local = column_parallel(
            self.norm(x, current), self.weight, build.tensor_group, build.sequence_parallel, current
        )
        return local[..., : self.shard.valid].to(wide(local.dtype))
