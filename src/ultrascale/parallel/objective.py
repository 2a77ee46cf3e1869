"""What is minimised: named sums over tokens, each divided by its named denominator of the whole global batch, here.

Nothing else in the system divides a loss or a gradient, so that every gradient reduction is a plain SUM and neither
micro-batches nor ranks nor uneven masks can change the objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the objective: coefficient · sum / denominator."""

    denominator: str
    """Name of an int64 count of the global batch: targets, rows, …"""
    coefficient: float


@dataclass(frozen=True)
class Objective:
    """The terms of a model family."""

    terms: Mapping[str, Term]

    def weight(self, name: str, denominators: Mapping[str, int]) -> float:
        """What a term's sum is multiplied by. A step without any target has a loss of 0, not NaN."""
        term = self.terms[name]
        return term.coefficient / max(1, denominators[term.denominator])

    def scalar(self, sums: Mapping[str, torch.Tensor], denominators: Mapping[str, int]) -> torch.Tensor:
        """This micro-batch's share of the objective: what backward starts from."""
        total = None
        for name in self.terms:
            if name in sums:
                share = sums[name] * self.weight(name, denominators)
                total = share if total is None else total + share
        assert total is not None, "a stage returned no terms"
        return total

    def report(self, sums: Mapping[str, float], denominators: Mapping[str, int]) -> dict[str, float]:
        """From the global sums: `loss`, the objective itself, and each term by its name, coefficient apart."""
        report = {"loss": sum(sums[name] * self.weight(name, denominators) for name in self.terms)}
        for name, term in self.terms.items():
            key = "lm_loss" if name == "lm" else f"aux_{name}"
            report[key] = sums[name] / max(1, denominators[term.denominator])
        return report
