"""Whether the ranks of a layout hold what one process of another implementation computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from small import whole
from ultrascale.config.schema import Config
from ultrascale.parallel.context.split import Cut, order, rank_runs

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Opinion:
    """What a model makes of its weights and a batch."""

    logits: np.ndarray
    """[batch, seq, vocabulary]"""
    terms: Mapping[str, float]
    """Terms of the loss, each divided by its denominator and not yet weighed."""
    gradients: Mapping[str, np.ndarray]
    """By our names of the parameters."""


def cover(models: Iterable[str], layouts: Iterable[str]) -> list[Any]:
    """(model, layout): each model under the first layout and one of the others, in turn; the rest for `make prove`."""
    first, *others = layouts
    cases = []
    for number, model in enumerate(models):
        kept = (first, others[number % len(others)])
        for layout in (first, *others):
            marks = () if layout in kept else (pytest.mark.prove,)
            cases.append(pytest.param(model, layout, marks=marks, id=f"{model}-{layout}"))
    return cases


class _Wide:
    """torch, in which float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextmanager
def widened(module: ModuleType) -> Iterator[None]:
    """What a file of theirs narrows to float32 is float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", _Wide())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE, f"{what} is off by {error:.3g} (relative)"


def compare(
    config: Config, ranks: Sequence[Mapping[str, Any]], weights: Mapping[str, np.ndarray], opinion: Opinion
) -> None:
    """What the ranks computed (our_side.py) is the opinion on these weights, which they hold bit for bit."""
    held = whole([rank["weights"] for rank in ranks])
    assert held.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(held[name], values, err_msg=name)

    last = [rank for rank in ranks if rank["last"]]
    tp, replicas = config.parallel.tp, (config.parallel.dp or 1) * config.parallel.ep
    assert len(last) == tp * config.parallel.cp * replicas
    close(_joined(config, last), opinion.logits, "the logits")
    for name, expected in opinion.terms.items():
        for place in range(tp):
            found = sum(rank["terms"][name] for rank in last[place::tp])
            close(np.array(found), np.array(expected), f"the term {name}")

    found = whole([rank["gradients"] for rank in ranks])
    assert found.keys() == opinion.gradients.keys()
    for name, values in opinion.gradients.items():
        assert np.abs(values).max() > 0
        close(found[name], values, f"the gradient of {name}")


def _joined(config: Config, last: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Logits [batch, seq, vocabulary] of ranks in the default order of axes, each of which has those of its own
    sequences, tokens and part of the vocabulary: [seq / cp, batch / replicas, part]."""
    tp, cut, length = config.parallel.tp, Cut.of(config), config.batch.sequence_length
    joined = np.empty((length, config.batch.global_size, config.model.vocab_size))
    each = tp * config.parallel.cp
    share = config.batch.global_size * each // len(last)
    for replica in range(len(last) // each):
        for index, runs in enumerate(rank_runs(length, (0,), cut)):
            first = replica * each + index * tp
            parts = np.concatenate([rank["logits"] for rank in last[first : first + tp]], axis=-1)
            joined[order(runs), replica * share : (replica + 1) * share] = parts
    return joined.transpose(1, 0, 2)
