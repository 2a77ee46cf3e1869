"""Saving: each rank writes what it owns into one safetensors file, and nothing counts until all of it is on
disk.

    temporary folder → each rank's file, hashed and put on disk while it is written, fsynced → rank 0 checks that
    the boxes of all ranks tile every tensor → manifest.json, fsynced → folder fsynced → rename → parent fsynced

Whatever dies before the rename leaves a folder that no reader takes for a checkpoint; an error on one rank
reaches all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from ultrascale.checkpoint.boxes import Box, CheckpointError
from ultrascale.checkpoint.commit import Probe, begin, commit, ignore
from ultrascale.checkpoint.folder import temporary_name
from ultrascale.checkpoint.manifest import DTYPES, FileEntry, Shard, digest, refuse
from ultrascale.checkpoint.safetensors_file import make_head, shard_key
from ultrascale.comm.collectives import gather_json
from ultrascale.comm.group import Group

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}

# Hashing and writing take turns on pieces of this size, so that one is under way while the other runs.
PIECE_BYTES = 8 << 20
# How much the system may hold back before the disk is told to begin.
FLUSHED_BYTES = 32 << 20


def save(
    folder: Path,
    boxes: Iterable[Box],
    header: Mapping[str, Any],
    group: Group | None = None,
    *,
    probe: Probe | None = None,
) -> int:
    """Writes a checkpoint; collective over `group` (all ranks that hold boxes; None: this process alone).

    folder  does not exist yet, and lies on storage that all ranks share; its parent is made
    boxes   those that this rank owns. In the whole group each element of each tensor is owned once; that is
            checked, in time linear in the number of boxes, before anything counts.
    header  the manifest's own keys: step, config, data_position, axes, ties, … (JSON). Rank 0's is the one
            that counts.
    returns the bytes written by all ranks

    Raises CheckpointError on every rank when it fails on any; the temporary folder is removed and nothing
    else is touched.
    """
    probe = probe or ignore
    rank = 0 if group is None else group.index

    # Rank 0's name counts: the others learn it from the same message that says the folder is there.
    temporary = temporary_name(folder)
    started = _agree(group, lambda: begin(folder, temporary, header) if rank == 0 else "", temporary)
    temporary = folder.with_name(started[0])
    gathered = _agree(group, lambda: _write_file(temporary, rank, list(boxes), probe), temporary)
    written: list[int] = _agree(
        group, lambda: commit(folder, temporary, header, gathered, probe) if rank == 0 else 0, temporary
    )
    return written[0]


def _agree(group: Group | None, work: Callable[[], Any], temporary: Path) -> list[Any]:
    """Does this rank's part and returns every rank's result; when any rank failed, all raise, and the folder
    goes."""
    result, failure, cause = None, None, None
    try:
        result = work()
    except Exception as error:
        failure, cause = _describe(error), error
    try:
        answers = [(result, failure)] if group is None else gather_json((result, failure), group)
    except Exception as error:
        # A rank died. Those that are left may not be able to talk any more: clean up here, and say so.
        answers = [(None, failure or f"the other ranks did not answer: {_describe(error)}")]
        cause = cause or error
    failures = [
        text if len(answers) == 1 else f"rank {i}: {text}" for i, (_, text) in enumerate(answers) if text is not None
    ]
    if failures:
        if group is None or group.index == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError("the checkpoint was not saved: " + "; ".join(failures)) from cause
    return [result for result, _ in answers]


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _write_file(temporary: Path, rank: int, boxes: list[Box], probe: Probe) -> list[Any] | None:
    """Writes this rank's file; returns [name, fields of its entry, rows], where a row is [tensor, global shape, dtype,
    fields of the shard]: plain lists, which can travel to rank 0."""
    boxes = [box for box in boxes if box.tensor.numel()]
    problems = [
        f"tensor {box.name}: dtype {box.tensor.dtype} cannot be stored; one of {', '.join(DTYPES)} is wanted"
        for box in boxes
        if box.tensor.dtype not in DTYPE_NAMES
    ]
    keys = [_key(box) for box in boxes]
    problems += [f"this rank owns {key!r} twice" for key, count in Counter(keys).items() if count > 1]
    refuse(problems)
    if not boxes:
        return None

    forms = {key: (DTYPE_NAMES[box.tensor.dtype], tuple(box.tensor.shape)) for key, box in zip(keys, boxes)}
    prefix, kept = make_head(forms)
    by_key = dict(zip(keys, boxes))

    name = f"rank-{rank:05d}.safetensors"
    rows = []
    probe("open")
    with open(temporary / name, "xb") as file, _ToDisk(file.fileno()) as disk, ThreadPoolExecutor(1) as hasher:
        file.write(prefix)
        for key in kept:
            box = by_key[key]
            probe("write")
            checksum = _write_tensor(file, box.tensor, hasher, disk)
            shard = Shard(name, key, box.offset, tuple(box.tensor.shape), checksum)
            rows.append([box.name, box.shape, DTYPE_NAMES[box.tensor.dtype], astuple(shard)])
        file.flush()
        probe("sync")
        disk.finish()
    size = max(place.stop for place in kept.values())
    return [name, astuple(FileEntry(size, digest(prefix))), rows]


class _ToDisk:
    """Has what is written to a file put on disk while more is written: left to itself, the system waits for the sync at
    the end, and processor and disk take turns."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None

    def __enter__(self) -> _ToDisk:
        return self

    def __exit__(self, *error: object) -> None:
        # The file is closed next, and its number may be another file's then.
        self._thread.shutdown()

    def written(self, count: int) -> None:
        """Told of bytes that were written; raises OSError when earlier ones could not be put on disk."""
        self._written += count
        if self._under_way is not None and not self._under_way.done():
            return
        self._ended()
        if self._written >= FLUSHED_BYTES:
            self._written = 0
            self._under_way = self._thread.submit(os.fdatasync, self._descriptor)

    def finish(self) -> None:
        """Returns when all is on disk; raises OSError when any of it is not."""
        self._ended()
        os.fsync(self._descriptor)

    def _ended(self) -> None:
        """The system tells of a failure once: what the thread was told must not be lost."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None


def _write_tensor(file: Any, tensor: torch.Tensor, hasher: ThreadPoolExecutor, disk: _ToDisk) -> str:
    """Writes the tensor's bytes, row-major and little-endian, and returns their checksum."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = flat.numpy().data
    sha = hashlib.sha256()
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        hashing = hasher.submit(sha.update, piece)
        file.write(piece)
        hashing.result()
        disk.written(len(piece))
    return "sha256:" + sha.hexdigest()


def _key(box: Box) -> str:
    return shard_key(box.name, box.shape, box.offset, tuple(box.tensor.shape))
