"""Saving: each rank writes what it owns into one safetensors file, and nothing counts until all of it is on
disk.

    temporary folder → each rank's file, hashed while the disk writes, fsynced → rank 0 checks that the boxes of
    all ranks tile every tensor → manifest.json, fsynced → folder fsynced → rename → parent fsynced

Whatever dies before the rename leaves a folder that no reader takes for a checkpoint; an error on one rank
reaches all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from ultrascale.checkpoint.boxes import Box, CheckpointError
from ultrascale.checkpoint.commit import Probe, begin, commit, ignore
from ultrascale.checkpoint.folder import begin_flush, temporary_name
from ultrascale.checkpoint.manifest import DTYPES, FileEntry, Shard, digest, refuse
from ultrascale.checkpoint.safetensors_file import make_head, shard_key
from ultrascale.comm.collectives import gather_json
from ultrascale.comm.group import Group

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}

# Written, and hashed while the disk has it.
PIECE_BYTES = 32 << 20


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
    with open(temporary / name, "xb", buffering=0) as file:
        _write_all(file, memoryview(prefix))
        for key in kept:
            box = by_key[key]
            probe("write")
            checksum = _write_tensor(file, box.tensor)
            shard = Shard(name, key, box.offset, tuple(box.tensor.shape), checksum)
            rows.append([box.name, box.shape, DTYPE_NAMES[box.tensor.dtype], astuple(shard)])
        probe("sync")
        os.fsync(file.fileno())
    size = max(place.stop for place in kept.values())
    return [name, astuple(FileEntry(size, digest(prefix))), rows]


def _write_tensor(file: FileIO, tensor: torch.Tensor) -> str:
    """Writes the tensor's bytes, row-major and little-endian, and returns their checksum."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = flat.numpy().data
    sha = hashlib.sha256()
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        begin_flush(file.fileno(), *_write_all(file, piece))
        sha.update(piece)
    return "sha256:" + sha.hexdigest()


def _write_all(file: FileIO, data: memoryview) -> tuple[int, int]:
    """Returns (first byte, number of bytes)."""
    start, done = file.tell(), 0
    while done < len(data):
        done += file.write(data[done:])  # may be less: before the end of a full disk, or of very much
    return start, done


def _key(box: Box) -> str:
    return shard_key(box.name, box.shape, box.offset, tuple(box.tensor.shape))
