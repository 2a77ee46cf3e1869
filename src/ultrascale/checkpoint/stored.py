"""Tensors as they lie in files, whoever wrote them, and boxes of them read piece by piece. Needs no torch.

Nothing is mapped: what is read lies in a buffer that the caller asked for, so that memory is what the caller says.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ultrascale.checkpoint.boxes import CheckpointError, Dims, elements, intersection, slices
from ultrascale.checkpoint.manifest import FileEntry, Manifest, Shard
from ultrascale.checkpoint.safetensors_file import locate, vouched_head, width
from ultrascale.checkpoint.values import UNSIGNED, Bits, numbers
from ultrascale.models.row_order import RowOrder

OPEN_FILES = 64
SHORT_RUN = 4096
"""Bytes: runs that are shorter are read together with what lies between them."""
SCRATCH_BYTES = 1 << 20
"""Read at a time where only parts are wanted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box of a tensor lies: row-major from byte `start` of a file."""

    file: Path
    key: str
    start: int
    offset: Dims
    shape: Dims
    checksum: str | None
    """"sha256:…" of its bytes; None where nobody says."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of blocks of a matrix whose elements lie in a narrower dtype than they mean.

    factors   float32, one for each block of the last two dims; dims before them as the tensor has
    block     rows and columns of a block; the last of either may be short
    dtype     of the elements as they lie
    """

    factors: StoredTensor
    block: tuple[int, int]
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A logical tensor: global shape, dtype (a key of manifest.DTYPES), and the places whose boxes tile it.

    rows     which of the rows that lie there is which of the tensor's, where the order is another; places are boxes of
             what lies there
    scales   what the elements that lie there are multiplied with; then `dtype` is that of the product
    """

    shape: Dims
    dtype: str
    places: tuple[Place, ...]
    rows: RowOrder | None = None
    scales: Scales | None = None

    @property
    def bytes(self) -> int:
        return elements(self.shape) * width(self.dtype)

    def boxes(self) -> list[tuple[Dims, Dims]]:
        """(offset, shape) of boxes that tile it, each in one place where rows lie in order."""
        if self.rows is not None:
            return [((0,) * len(self.shape), self.shape)]
        return [(place.offset, place.shape) for place in self.places]


Stored = Mapping[str, StoredTensor]
"""Logical name → tensor."""


class Places:
    """The places of a tensor, found by the rows that they hold: of many thousands, a box touches a few."""

    def __init__(self, tensor: StoredTensor) -> None:
        self.tensor = tensor
        first = [(place.offset[0] if place.offset else 0) for place in tensor.places]
        order = sorted(range(len(first)), key=first.__getitem__)
        self._places = [tensor.places[i] for i in order]
        self._first = [first[i] for i in order]
        # Where the places up to each one end at the latest: none before the first that reaches a row holds it.
        ends = (place.offset[0] + place.shape[0] if place.offset else 1 for place in self._places)
        self._reach = list(accumulate(ends, max))

    def touching(self, offset: Dims, shape: Dims) -> StoredTensor:
        """The tensor with only those places that share an element with the box."""
        row, rows = (offset[0], shape[0]) if offset else (0, 1)
        if self.tensor.rows is not None:
            there = self.tensor.rows.stored(row, rows)
            row, rows = int(there.min()), int(there.max() - there.min()) + 1
            offset, shape = (row, *offset[1:]), (rows, *shape[1:])
        near = self._places[bisect_right(self._reach, row) : bisect_left(self._first, row + rows)]
        found = tuple(place for place in near if intersection(place.offset, place.shape, offset, shape))
        return replace(self.tensor, places=found)


def stored_tensors(folder: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint; raises CheckpointError when a file is missing or its header is another one."""
    files = {name: FileOfShards(folder / name, entry) for name, entry in manifest.files.items()}
    return {
        name: StoredTensor(
            entry.shape,
            entry.dtype,
            tuple(files[shard.file].place(shard, entry.dtype, name) for shard in entry.shards),
        )
        for name, entry in manifest.tensors.items()
    }


class FileOfShards:
    """A checkpoint's file, whose header is the one that the manifest vouches for; else CheckpointError."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self.path, self._bytes = path, entry.bytes
        self._data, self._header = vouched_head(path, entry)

    def place(self, shard: Shard, dtype: str, name: str) -> Place:
        """Where a shard of tensor `name` lies; raises CheckpointError when the header describes something else."""
        start = locate(self.path, self._data, self._header, self._bytes, shard, dtype, name)
        return Place(self.path, shard.key, start, shard.offset, shard.shape, shard.checksum)


class Reader:
    """Reads through a few open files; close it, or use it in a `with`. One thread at a time, or all from files that are
    open already, OPEN_FILES at most."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def box(self, tensor: StoredTensor, offset: Dims, shape: Dims) -> Bits:
        """The bits of a box, of its shape; every element of it lies in exactly one place."""
        if tensor.rows is None:
            return self._in_order(tensor, offset, shape)
        # As many rows at once as lie together: those of whole heads do, in whatever order they are wanted.
        wanted = tensor.rows.stored(offset[0], shape[0])
        order = np.argsort(wanted)
        found: Bits = np.empty(shape, UNSIGNED[width(tensor.dtype)])
        for run in np.split(order, np.flatnonzero(np.diff(wanted[order]) != 1) + 1):
            corner = (int(wanted[run[0]]), *offset[1:])
            found[run] = self._in_order(tensor, corner, (len(run), *shape[1:]))
        return found

    def _in_order(self, tensor: StoredTensor, offset: Dims, shape: Dims) -> Bits:
        """The bits of a box of what lies there, scaled."""
        scales = tensor.scales
        if scales is None:
            return self._as_it_lies(tensor, tensor.dtype, offset, shape)
        values = numbers(self._as_it_lies(tensor, scales.dtype, offset, shape), scales.dtype)
        # Blocks that the box touches, each factor repeated over its block, and of that the box.
        lead = len(shape) - 2
        begin = [o // b for o, b in zip(offset[lead:], scales.block)]
        end = [-(-(o + n) // b) for o, n, b in zip(offset[lead:], shape[lead:], scales.block)]
        corner, size = (*offset[:lead], *begin), (*shape[:lead], *(e - b for b, e in zip(begin, end)))
        factors: Any = numbers(self.box(scales.factors, corner, size), "float32")
        for dim, (first, block) in enumerate(zip(begin, scales.block), start=lead):
            skipped = offset[dim] - first * block
            factors = factors.repeat(block, axis=dim).take(range(skipped, skipped + shape[dim]), axis=dim)
        product: Bits = (values * factors).astype(np.float32, copy=False).view(np.uint32)
        return product

    def _as_it_lies(self, tensor: StoredTensor, dtype: str, offset: Dims, shape: Dims) -> Bits:
        size = width(dtype)
        out: Any = np.empty(shape, UNSIGNED[size])
        for place in tensor.places:
            common = intersection(place.offset, place.shape, offset, shape)
            if common:
                corner = tuple(c - o for c, o in zip(common[0], place.offset))
                self.fill(place, corner, common[1], out[(*slices(*common, offset), ...)])
        found: Bits = out
        return found

    def bytes(self, place: Place, start: int, count: int) -> Bits:
        """`count` bytes from byte `start` of a place."""
        out = np.empty(count, np.uint8)
        self._read(place.file, place.start + start, out)
        return out

    def fill(self, place: Place, corner: Dims, shape: Dims, out: Any) -> None:
        """Reads the box at `corner` of a place into `out`, bits of that shape in any strides (of a single element too:
        a view)."""
        dims, size = len(shape), out.itemsize
        strides = [prod(place.shape[d + 1 :]) for d in range(dims)]
        # Dims from `run` on are one stretch of the file.
        run = dims
        while run > 0 and shape[run:] == place.shape[run:]:
            run -= 1
        first = place.start + size * sum(c * s for c, s in zip(corner, strides))
        length = prod(shape[run:])
        if run == 0 or length * size >= SHORT_RUN:
            for outer in product(*map(range, shape[:run])):
                at = first + size * sum(i * s for i, s in zip(outer, strides))
                self._read_into(place.file, at, out[(*outer, ...)], size)
            return
        # Rows of which a little is wanted: some of them at a time, gaps included.
        rows, stride = shape[run - 1], strides[run - 1]
        block = max(1, SCRATCH_BYTES // (stride * size))
        for outer in product(*map(range, shape[: run - 1])):
            begin = first + size * sum(i * s for i, s in zip(outer, strides))
            for row in range(0, rows, block):
                count = min(block, rows - row)
                whole = np.empty((count - 1) * stride + length, UNSIGNED[size])
                self._read(place.file, begin + row * stride * size, whole)
                picked = np.lib.stride_tricks.as_strided(whole, (count, length), (stride * size, size))
                out[outer][row : row + count] = picked.reshape(count, *shape[run:])

    def _read_into(self, path: Path, start: int, out: Bits, size: int) -> None:
        if out.flags.c_contiguous:
            self._read(path, start, out)
            return
        flat = np.empty(out.shape, UNSIGNED[size])
        self._read(path, start, flat)
        out[...] = flat

    def _read(self, path: Path, start: int, out: Bits) -> None:
        """Fills a contiguous array from byte `start` of the file."""
        data = out.reshape(-1).view(np.uint8).data
        file, done = self.open(path), 0
        while done < len(data):
            try:
                count = os.preadv(file, [data[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{path}: the file cannot be read: {error.strerror or error}") from error
            if count == 0:
                raise CheckpointError(
                    f"{path}: the file ends at byte {start + done}: it was truncated while it was read"
                )
            done += count

    def open(self, path: Path) -> int:
        """The file's descriptor; raises CheckpointError when it cannot be opened."""
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            try:
                self._open[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path}: the file cannot be read: {error.strerror or error}") from error
        self._open.move_to_end(path)
        return self._open[path]
