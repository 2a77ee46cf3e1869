"""What a model reads: one micro-batch, and the micro-batches of a step with their global denominators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Padding:
    """Which tokens only fill a sequence up: no experts see them, and no mean counts them."""

    real: torch.Tensor
    """bool [seq, batch]: whether a token here is text."""
    lengths: torch.Tensor
    """int64 [batch]: tokens of text of each whole row."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of one micro-batch, in the form [seq, batch] of every tensor between layers: a cp rank's own share."""

    inputs: torch.Tensor
    """int64 [seq, batch]"""
    labels: tuple[torch.Tensor, ...]
    """Per prediction depth int64 [seq, batch], shifted before any cut; −100 = no target. Empty: logits are wanted."""
    positions: torch.Tensor
    """int64 [seq, batch]: position of each token in its sequence (or document)."""
    further_inputs: tuple[torch.Tensor, ...] = ()
    """For each depth of prediction but the first int64 [seq, batch]: the token so many places on, target or not."""
    documents: tuple[tuple[int, ...], ...] | None = None
    """For each row where its documents begin in the whole sequence, whatever of it is here; None: one document."""
    padding: Padding | None = None
    """None: all tokens are text."""
    places: torch.Tensor | None = None
    """int64 [seq, batch]: where in its whole sequence each token is; None: the sequence is here, in order."""
    samples: torch.Tensor | None = None
    """int64 [batch]: each row's number among the samples of the run; None: it is none of them."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """This rank's micro-batches of one step, and the counts of the *global* batch that terms are divided by."""

    micro_batches: Sequence[MicroBatch]
    denominators: Mapping[str, int]
