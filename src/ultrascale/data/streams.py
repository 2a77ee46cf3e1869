"""The endless sequence of samples of one side of a run: draws from a blend, or the synthetic ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.blend import Blend, quantise
from ultrascale.data.builtin import UNEVEN, Uneven
from ultrascale.data.samples import EpochOrder, Sample, Source

Ints = NDArray[np.int64]


class Stream(Protocol):
    """The endless sequence of samples of one side (train or validation)."""

    def read(self, numbers: Ints) -> list[Sample]:
        """Samples by number [n], from 0."""
        ...

    def position(self, samples: int) -> dict[str, Any]:
        """Where each dataset stands after `samples` samples; JSON."""
        ...

    def identity(self) -> dict[str, Any]:
        """What decides the content of every sample; JSON."""
        ...


class BlendStream:
    """Samples drawn from sources by whole weights, each source in its epoch order."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int) -> None:
        self._sources = tuple(sources)
        self._blend = Blend(quantise(weights))
        self._orders = tuple(EpochOrder(source, seed) for source in sources)
        self._seed = seed

    def locate(self, numbers: Ints) -> tuple[Ints, Ints]:
        """(source [n], its sample [n]) of sample numbers [n]."""
        sources, draws = self._blend.draw(numbers)
        indices = np.empty_like(draws)
        for source in np.unique(sources):
            here = sources == source
            indices[here] = self._orders[source].samples(draws[here])
        return sources, indices

    def read(self, numbers: Ints) -> list[Sample]:
        sources, indices = self.locate(numbers)
        return [self._sources[source].read(int(index)) for source, index in zip(sources, indices)]

    def position(self, samples: int) -> dict[str, Any]:
        drawn = self._blend.drawn(samples)
        return {
            "samples": samples,
            "datasets": [
                {
                    "name": source.name,
                    "drawn": count,
                    "epoch": count // source.samples,
                    "place": count % source.samples,
                }
                for source, count in zip(self._sources, drawn)
            ],
        }

    def identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "datasets": [
                {"fingerprint": source.fingerprint, "weight": weight}
                for source, weight in zip(self._sources, self._blend.quantised)
            ],
        }


class UnevenStream:
    """The samples of builtin:uneven, in the order of their numbers."""

    def __init__(self, source: Uneven) -> None:
        self._source = source

    def read(self, numbers: Ints) -> list[Sample]:
        return [self._source.read(int(number)) for number in numbers]

    def position(self, samples: int) -> dict[str, Any]:
        return {"samples": samples, "datasets": [{"name": UNEVEN, "drawn": samples}]}

    def identity(self) -> dict[str, Any]:
        return {
            "seed": self._source.seed,
            "datasets": [{"fingerprint": f"{UNEVEN} of {self._source.vocab_size} ids", "weight": 1}],
        }
