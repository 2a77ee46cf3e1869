"""Noise on what a router sees, so that close choices fall now one way, now the other (Fedus et al. 2021, Switch, §2.3).

Drawn for each sample, place in it and feature: the same under every layout and whenever a forward is computed again.
"""

from __future__ import annotations

import torch

from ultrascale.parallel.init import key_of, philox
from ultrascale.precision.policy import wide

WORDS = 4
"""Draws from one counter: 32 bits of each are enough for a factor near 1."""


def jittered(
    x: torch.Tensor, samples: torch.Tensor, places: torch.Tensor, longest: int, noise: float, seed: int, router: str
) -> torch.Tensor:
    """x · u, with u uniform in [1 − noise, 1 + noise); wide, so that small noise is not rounded away.

    x         [tokens, hidden]; tokens lie as [places here, rows]
    samples   int64 [rows]: numbers of the run's samples, each drawn in one step alone
    places    int64 [places here, rows]
    longest   places that a sequence has at most
    router    the name of the one that looks
    """
    counters = -(-x.shape[1] // WORDS)
    first = (samples * longest + places).flatten() * counters
    words = philox((first.unsqueeze(-1) + torch.arange(counters, device=x.device)).flatten(), key_of(seed, router))
    drawn = torch.stack(words, dim=-1).view(x.shape[0], -1)[:, : x.shape[1]]
    uniform = drawn.to(wide(x.dtype)) * 2.0**-32
    return x.to(uniform.dtype) * (1.0 - noise + 2.0 * noise * uniform)
