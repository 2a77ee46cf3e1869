"""Where moments are held: beside the masters, or in host memory, from which they come one segment ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ultrascale.optim.segments import Segment, State

SLOTS = 3
"""Segments whose state is on the device at a time: one that comes, one that is updated, one that goes."""


class Resident:
    """State lies on the device of the masters."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def hold(self, segment: Segment, names: Sequence[str]) -> None:
        """Gives the segment its state, zeros."""
        segment.state = {name: torch.zeros(segment.numel, dtype=self.dtype, device=self.device) for name in names}

    def visit(self, segments: Sequence[Segment]) -> Iterator[tuple[Segment, State]]:
        """Each segment with its state on the device; what is written to it until the next one is asked for stays."""
        for segment in segments:
            yield segment, segment.state

    def settle(self) -> None:
        """Returns when the host can read what is held."""


class Offloaded(Resident):
    """State lies in pinned host memory; two streams copy it, one each way, while other segments are updated.

    On the device are SLOTS pieces of memory of the size of the largest segment's state. On a device without streams
    the copies are made where they are issued.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        cuda = device.type == "cuda"
        self._in = torch.cuda.Stream(device) if cuda else None
        self._out = torch.cuda.Stream(device) if cuda else None
        self._blocks: dict[Segment, torch.Tensor] = {}
        """[states · numel] on the host."""
        self._slots: list[torch.Tensor] = []
        self._gone: list[torch.cuda.Event | None] = [None] * SLOTS
        """When the last content of a slot is on the host."""

    def hold(self, segment: Segment, names: Sequence[str]) -> None:
        block = torch.zeros(len(names) * segment.numel, dtype=self.dtype, pin_memory=self._in is not None)
        self._blocks[segment] = block
        segment.state = _named(segment, names, block)

    def visit(self, segments: Sequence[Segment]) -> Iterator[tuple[Segment, State]]:
        self._make_slots()
        if self._in and self._out:
            self._in.wait_stream(self._out)  # the last step may still be writing what comes first now
        coming = self._fetch(segments, 0)
        for number, segment in enumerate(segments):
            block = coming
            if self._in:
                torch.cuda.current_stream(self.device).wait_stream(self._in)
            coming = self._fetch(segments, number + 1)
            yield segment, _named(segment, tuple(segment.state), block)
            self._give_back(segment, block, number % SLOTS)

    def settle(self) -> None:
        if self._out:
            self._out.synchronize()

    def _make_slots(self) -> None:
        if not self._slots:
            size = max((block.numel() for block in self._blocks.values()), default=0)
            self._slots = [torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(SLOTS)]

    def _fetch(self, segments: Sequence[Segment], number: int) -> torch.Tensor:
        """Begins to copy a segment's state to the device; past the last one, nothing."""
        slot = self._slots[number % SLOTS]
        if number >= len(segments):
            return slot[:0]
        source, gone = self._blocks[segments[number]], self._gone[number % SLOTS]
        if self._in and gone:
            self._in.wait_event(gone)
        with _on(self._in):
            return slot[: source.numel()].copy_(source, non_blocking=True)

    def _give_back(self, segment: Segment, block: torch.Tensor, slot: int) -> None:
        if self._out:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
        with _on(self._out):
            self._blocks[segment].copy_(block, non_blocking=True)
        if self._out:
            self._gone[slot] = self._out.record_event()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def _named(segment: Segment, names: Sequence[str], block: torch.Tensor) -> State:
    return {name: block[n * segment.numel : (n + 1) * segment.numel] for n, name in enumerate(names)}
