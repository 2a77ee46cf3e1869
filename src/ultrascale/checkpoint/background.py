"""Saving while training goes on: a true copy of the state first, then everything else in a thread.

The copy lies in buffers of its own, in host memory, pinned where the state is on a GPU; the next save uses them again.
The thread's collectives are on a group that nothing else uses, on gloo: on training's own they would stand between
training's calls in another order on each rank, and all would wait for ever. One save runs at a time; the next waits for
it, which is the back-pressure of a disk that is too slow.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ultrascale.checkpoint.boxes import Box

Work = Callable[[Path, list[Box], Mapping[str, Any]], None]

# The allocator of pinned memory rounds up to a power of two: boxes share pieces of this size, so that it has nothing to
# round, where one piece for each box could take up to twice the bytes.
PIECE_BYTES = 1 << 30
ALIGNMENT = 64


class Background:
    """Runs `work(folder, boxes, header)` in a thread, one call after another."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._buffers: list[torch.Tensor] = []

    @property
    def failed(self) -> bool:
        """Whether the work that was begun last has ended badly, and nobody has been told yet."""
        return self._error is not None

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, folder: Path, boxes: Iterable[Box], header: Mapping[str, Any]) -> None:
        """Begins the work on the state as it is now; returns when the state may change. Raises as `wait` does."""
        self.wait()
        copies = self._copied(boxes)
        arguments = (folder, copies, copy.deepcopy(dict(header)))
        # Not a daemon: an interpreter that ends does not end a save.
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is under way; raises what the last work raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, folder: Path, boxes: list[Box], header: Mapping[str, Any]) -> None:
        try:
            self._work(folder, boxes, header)
        except Exception as error:
            self._error = error

    def _copied(self, boxes: Iterable[Box]) -> list[Box]:
        boxes = list(boxes)
        sources = [box.tensor.detach() for box in boxes]
        on_gpu = any(source.is_cuda for source in sources)
        if [(b.shape, b.dtype) for b in self._buffers] != [(s.shape, s.dtype) for s in sources]:
            self._buffers = []  # the old ones go first
            self._buffers = host_memory(sources, pinned=on_gpu)
        for buffer, source in zip(self._buffers, sources, strict=True):
            buffer.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return [Box(b.name, b.shape, b.offset, buffer) for b, buffer in zip(boxes, self._buffers, strict=True)]


def host_memory(sources: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    """Contiguous tensors of the shapes and dtypes of the sources, one behind another in a few pieces of host memory."""
    rooms = [-(-source.numel() * source.element_size() // ALIGNMENT) * ALIGNMENT for source in sources]
    buffers, left, used = [], sum(rooms), 0
    piece = torch.empty(0, dtype=torch.uint8)
    for source, room in zip(sources, rooms, strict=True):
        if used + room > len(piece):
            piece = torch.empty(max(room, min(PIECE_BYTES, left)), dtype=torch.uint8, pin_memory=pinned)
            used = 0
        count = source.numel() * source.element_size()
        buffers.append(piece[used : used + count].view(source.dtype).view(source.shape))
        used, left = used + room, left - room
    return buffers
