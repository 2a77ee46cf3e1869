"""States, cuts and worlds that the checkpoint tests share."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultrascale.checkpoint import write
from ultrascale.checkpoint.boxes import Box, slices

HEADER = {
    "step": 7,
    "config": {"model": {"hidden_size": 8}},
    "data_position": {"samples": 112},
    "axes": {},
    "ties": [],
}
Cut = list[tuple[tuple[int, ...], tuple[int, ...]]]


def header(step: int) -> dict[str, Any]:
    return {**HEADER, "step": step}


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small state with each dtype that a run stores, a scalar, and an element of every kind that is easily
    lost."""
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(12, 8, generator=make)
    weight[0, 0], weight[1, 1], weight[2, 2] = float("nan"), -0.0, float("inf")
    return {
        "embedding.weight": weight,
        "optimizer.exp_avg/embedding.weight": torch.randn(12, 8, generator=make),
        "head.weight": torch.randn(5, 8, generator=make).to(torch.bfloat16),
        "experts.weight": torch.randn(4, 3, 6, generator=make, dtype=torch.float64),
        "router.tokens": torch.randint(-(2**62), 2**62, (9,), generator=make),
        "scale": torch.tensor(3.5, dtype=torch.float64),
    }


def whole_boxes(tensors: dict[str, torch.Tensor]) -> list[Box]:
    return [Box(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same form filled with bytes that no test state has."""
    return {name: torch.full_like(t, 77) for name, t in tensors.items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*raw)


def cut(shape: tuple[int, ...], pieces: int, random: np.random.Generator) -> Cut:
    """The shape cut into at most so many boxes, by random cuts of random boxes along random dims."""
    boxes: Cut = [((0,) * len(shape), shape)]
    for _ in range(pieces - 1):
        offset, size = boxes.pop(random.integers(len(boxes)))
        dims = [d for d, n in enumerate(size) if n > 1]
        if not dims:
            boxes.append((offset, size))
            continue
        d = random.choice(dims)
        at = int(random.integers(1, size[d]))
        boxes.append((offset, (*size[:d], at, *size[d + 1 :])))
        boxes.append(((*offset[:d], offset[d] + at, *offset[d + 1 :]), (*size[:d], size[d] - at, *size[d + 1 :])))
    return boxes


def boxes_of(name: str, tensor: torch.Tensor, pieces: Cut) -> list[Box]:
    """Boxes that are views of the tensor, hence mostly not contiguous."""
    shape = tuple(tensor.shape)
    return [Box(name, shape, offset, tensor[slices(offset, size, (0,) * len(shape))]) for offset, size in pieces]


@dataclass(frozen=True)
class ThreadRank:
    """A rank of a world of threads, as far as `save` looks at a group."""

    index: int
    size: int


class ThreadWorld:
    """Ranks as threads of this process, with a gather in place of comm's."""

    def __init__(self, size: int, monkeypatch: Any) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size
        monkeypatch.setattr(write, "gather_json", self._gather)

    def _gather(self, value: Any, group: ThreadRank) -> list[Any]:
        self._slots[group.index] = value
        self._barrier.wait(20)
        answers = list(self._slots)
        self._barrier.wait(20)
        return answers

    def save(self, folder: Path, boxes: list[list[Box]], **options: Any) -> list[int | Exception]:
        """What `save` returned or raised on each rank."""

        def rank(index: int) -> int | Exception:
            probe = options.get("probes", {}).get(index)
            try:
                return write.save(folder, boxes[index], HEADER, ThreadRank(index, self.size), probe=probe)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(rank, range(self.size)))
