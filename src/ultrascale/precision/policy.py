"""Which dtype each hop of a number has: compute, accumulate, reduce, master."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ultrascale.config.schema import Config

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """max(float32, dtype): what norms, cross entropy, masters, accumulation and reduction use."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Policy:
    """The dtypes of a run."""

    compute: torch.dtype
    """Of the parameters that forward and backward read, and of the activations."""
    master: torch.dtype
    """Of the optimizer's copy, and of its moments unless optimizer.state_dtype says otherwise."""
    accumulate: torch.dtype
    """In which gradients of micro-batches are added up."""
    reduce: torch.dtype
    """In which gradients travel."""
    combine: torch.dtype
    """In which outputs of a token's experts are added."""

    @staticmethod
    def of(config: Config) -> Policy:
        compute = DTYPES[config.precision.compute]
        reduce = DTYPES[config.precision.reduce] if config.precision.reduce else wide(compute)
        combine = compute if config.precision.combine == "compute" else wide(compute)
        return Policy(compute, master=wide(compute), accumulate=wide(compute), reduce=reduce, combine=combine)
