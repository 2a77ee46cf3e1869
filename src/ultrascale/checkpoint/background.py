"""Saving while training goes on: a true copy of the state first, then everything else in a thread.

The copy lies in buffers of its own, in host memory, pinned where the state is on a GPU; the next save uses them again.
The thread's collectives are on a group that nothing else uses, on gloo: on training's own they would stand between
training's calls in another order on each rank, and all would wait for ever. One save runs at a time; the next waits for
it, which is the back-pressure of a disk that is too slow.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ultrascale.checkpoint.boxes import Box

Work = Callable[[Path, list[Box], Mapping[str, Any]], None]


class Background:
    """Runs `work(folder, boxes, header)` in a thread, one call after another."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    @property
    def failed(self) -> bool:
        """Whether the work that was begun last has ended badly, and nobody has been told yet."""
        return self._error is not None

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
        copies, on_gpu = [], False
        for box in boxes:
            source, key = box.tensor.detach(), (box.name, box.offset)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._buffers[key] = buffer
            buffer.copy_(source, non_blocking=True)
            on_gpu = on_gpu or source.is_cuda
            copies.append(Box(box.name, box.shape, box.offset, buffer))
        if on_gpu:
            torch.cuda.synchronize()
        return copies
