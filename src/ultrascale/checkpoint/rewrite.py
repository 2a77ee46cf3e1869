"""Stored tensors into new safetensors files: cut otherwise, under other names, in another dtype, in bounded memory.

Files are laid out first, so that each piece knows its bytes and any process can write it. Needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale.checkpoint.boxes import CheckpointError, Dims, elements, pieces
from ultrascale.checkpoint.commit import Written, begin, commit, ignore
from ultrascale.checkpoint.folder import begin_flush, temporary_name
from ultrascale.checkpoint.manifest import FileEntry, Shard, digest
from ultrascale.checkpoint.safetensors_file import make_head, shard_key, width
from ultrascale.checkpoint.stored import Places, Reader, Stored, StoredTensor
from ultrascale.checkpoint.values import convert, numbers
from ultrascale.checkpoint.workers import Workers

Advance = Callable[[int], None]
Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""

FILE_BYTES = 4 << 30
"""Of a file of a checkpoint that no run wrote."""


class Count:
    """Bytes done of a known total, for a progress bar."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self._progress = 0, total, progress

    def __call__(self, count: int) -> None:
        self.done += count
        if self._progress is not None:
            self._progress(self.done, self.total)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a source tensor, as it is to lie in a file.

    form    shape in the file: that of the box, or another of as many elements
    """

    key: str
    name: str
    offset: Dims
    shape: Dims
    form: Dims
    dtype: str

    @property
    def bytes(self) -> int:
        return elements(self.shape) * width(self.dtype)


def box_piece(name: str, tensor: StoredTensor, offset: Dims, shape: Dims) -> Piece:
    """A box under the key that a save gives it, in the tensor's own dtype."""
    return Piece(shard_key(name, tensor.shape, offset, shape), name, offset, shape, shape, tensor.dtype)


def pieces_of(name: str, tensor: StoredTensor, dtype: str) -> Iterator[Piece]:
    """All of a tensor in another dtype, in pieces that fit into files."""
    for offset, shape in pieces((0,) * len(tensor.shape), tensor.shape, FILE_BYTES // width(dtype)):
        yield replace(box_piece(name, tensor, offset, shape), dtype=dtype)


@dataclass(frozen=True)
class WrittenFile:
    """A file as the manifest describes it, and the checksum of each key's bytes."""

    entry: FileEntry
    checksums: Mapping[str, str]


def write_files(
    folder: Path,
    source: Stored,
    files: Mapping[str, Sequence[Piece]],
    workers: Workers,
    advance: Advance,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, WrittenFile]:
    """Writes the files into `folder`, and syncs them.

    Raises CheckpointError when a source file cannot be read, or a value does not fit its new dtype; OSError when a
    file cannot be written.
    """
    heads: dict[str, bytes] = {}
    tasks: list[tuple[str, int, StoredTensor, Piece, int]] = []
    places = {name: Places(tensor) for name, tensor in source.items()}
    for name, chosen in files.items():
        prefix, kept = make_head({piece.key: (piece.dtype, piece.form) for piece in chosen}, metadata)
        heads[name] = prefix
        with open(folder / name, "xb") as file:
            file.write(prefix)
            file.truncate(max((place.stop for place in kept.values()), default=len(prefix)))
        for piece in chosen:
            tensor = places[piece.name].touching(piece.offset, piece.shape)
            tasks.append((str(folder / name), kept[piece.key].start, tensor, piece, workers.block_bytes))
    tasks.sort(key=lambda task: _first_byte(task[2]))
    checksums: dict[str, dict[str, str]] = {name: {} for name in files}
    for number, checksum in workers.run(write_piece, tasks):
        path, piece = Path(tasks[number][0]), tasks[number][3]
        checksums[path.name][piece.key] = checksum
        advance(piece.bytes)
    written = {}
    for name in files:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            size = file.seek(0, 2)
        written[name] = WrittenFile(FileEntry(size, digest(heads[name])), checksums[name])
    return written


def _first_byte(tensor: StoredTensor) -> tuple[str, int]:
    """Where it is read from, to read in the files' order: what lies ahead is on its way from the disk then."""
    return min(((str(place.file), place.start) for place in tensor.places), default=("", 0))


def write_checkpoint(
    target: Path,
    header: Mapping[str, Any],
    source: Stored,
    chosen: Sequence[Piece],
    workers: Workers,
    advance: Advance,
    beside: Callable[[Path], None] = lambda folder: None,
) -> tuple[int, int]:
    """Writes a checkpoint of these pieces of stored tensors; returns its bytes and how many files have tensors.

    beside   writes what else the folder is to hold

    Raises CheckpointError as `write_files` and `commit` do, and leaves nothing behind then.
    """
    shards = in_shards(iter(chosen), FILE_BYTES)
    files = {f"rank-{number:05d}.safetensors": shard for number, shard in enumerate(shards)}
    temporary = temporary_name(target)
    with cleared(temporary):
        begin(target, temporary, header)
        written = write_files(temporary, source, files, workers, advance)
        beside(temporary)
        size = commit(target, temporary, header, as_written(files, written, source), ignore)
    return size, len(files)


def write_piece(path: str, start: int, tensor: StoredTensor, piece: Piece, block_bytes: int) -> str:
    """Writes one piece at byte `start` of the file; returns the checksum of its bytes."""
    sha, at = hashlib.sha256(), start
    limit = max(1, block_bytes // max(width(tensor.dtype), width(piece.dtype)))
    with Reader() as reader, open(path, "r+b") as file:
        file.seek(start)
        for offset, shape in pieces(piece.offset, piece.shape, limit):
            bits = reader.box(tensor, offset, shape).reshape(-1)
            changed = np.ascontiguousarray(convert(bits, tensor.dtype, piece.dtype))
            if piece.dtype == "float16" and tensor.dtype != "float16":
                _refuse_overflow(piece, numbers(bits, tensor.dtype), numbers(changed, "float16"))
            data = changed.view(np.uint8).data
            sha.update(data)
            file.write(data)
            at += len(data)
        file.flush()
        begin_flush(file.fileno(), start, at - start)
    assert at == start + piece.bytes, "the blocks of a piece add up to it"
    return "sha256:" + sha.hexdigest()


def _refuse_overflow(piece: Piece, before: np.ndarray, after: np.ndarray) -> None:
    lost = int((np.isfinite(before) & ~np.isfinite(after)).sum())
    if lost:
        raise CheckpointError(f"{piece.name}: {lost} values are beyond float16 (65504); use bfloat16 or float32")


def as_written(
    files: Mapping[str, Sequence[Piece]], written: Mapping[str, WrittenFile], source: Stored
) -> list[Written]:
    """What `commit` takes, of files whose pieces are boxes of the source's tensors."""
    gathered: list[Written] = []
    for name, chosen in files.items():
        rows = [
            [
                piece.name,
                source[piece.name].shape,
                piece.dtype,
                astuple(Shard(name, piece.key, piece.offset, piece.shape, written[name].checksums[piece.key])),
            ]
            for piece in chosen
        ]
        gathered.append([name, astuple(written[name].entry), rows])
    return gathered


def compare_stored(source: Stored, written: Stored, target: Path, workers: Workers, advance: Advance) -> None:
    """Reads both again, what was written as who starts from it would: the source's checksums must hold, and every value
    must be the source's, rounded once.

    target   for the message of the CheckpointError
    """
    if lost := sorted(source.keys() ^ written.keys()):
        raise CheckpointError(f"{target}: {', '.join(lost)} came out otherwise than it was read; nothing is kept")
    places = {name: Places(tensor) for name, tensor in written.items()}
    boxes = []
    for name, tensor in source.items():
        near = Places(tensor)
        boxes += [(name, near.touching(offset, shape), offset, shape) for offset, shape in tensor.boxes()]
    boxes.sort(key=lambda box: _first_byte(box[1]))
    tasks = []
    for name, tensor, offset, shape in boxes:
        # Few places each: what a task is given travels to its process.
        far = places[name].touching(offset, shape) if written[name].shape == tensor.shape else written[name]
        tasks.append((tensor, far, offset, shape, workers.block_bytes))
    for number, (checksum, same) in workers.run(compared, tasks):
        name, tensor, _, shape = boxes[number]
        for place in tensor.places:
            if place.checksum not in (None, checksum):
                raise CheckpointError(
                    f"{place.file}: checksum of tensor {name} (key {place.key!r}) does not match: damaged"
                )
        if not same:
            raise CheckpointError(f"{target}: {name} came out otherwise than it was read; nothing is kept")
        advance(elements(shape) * width(source[name].dtype))


def compared(
    tensor: StoredTensor, written: StoredTensor, offset: Dims, shape: Dims, block_bytes: int
) -> tuple[str, bool]:
    """(checksum of a box, whether each value of it, in the dtype of the other, is the other's)"""
    if tensor.shape != written.shape:
        return "", False
    limit = max(1, block_bytes // max(width(tensor.dtype), width(written.dtype)))
    near, far = Places(tensor), Places(written)
    sha, same = hashlib.sha256(), True
    with Reader() as reader:
        for box in pieces(offset, shape, limit):
            bits = reader.box(near.touching(*box), *box).reshape(-1)
            sha.update(bits.view(np.uint8).data)
            changed = convert(bits, tensor.dtype, written.dtype)
            same = same and np.array_equal(changed, reader.box(far.touching(*box), *box).reshape(-1))
    return "sha256:" + sha.hexdigest(), same


def in_shards(named: Iterator[Piece], limit: int) -> list[list[Piece]]:
    """The pieces in order, in lists of at most `limit` bytes each; a larger piece has one of its own."""
    shards: list[list[Piece]] = []
    size = 0
    for piece in named:
        if not shards or size + piece.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.bytes
    return shards


def refuse_to_overwrite(target: Path) -> None:
    """Raises CheckpointError when something is there already, whatever it is."""
    if target.exists():
        raise CheckpointError(f"{target} is there already and is not replaced; remove it, or give another folder")


@contextmanager
def cleared(temporary: Path) -> Iterator[None]:
    """Removes the temporary folder when something goes wrong on the way; what the disk says is said in our words."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{temporary.parent}: nothing was written: {error}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
