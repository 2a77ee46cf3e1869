"""The two ends of a save that one process does alone: the temporary folder, and the manifest with the rename that makes
it count. Needs no torch.

Whatever dies before the rename leaves a folder that no reader takes for a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ultrascale.checkpoint.boxes import CheckpointError, Dims
from ultrascale.checkpoint.folder import is_whole, set_aside, sync_folder
from ultrascale.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Shard,
    TensorEntry,
    check,
    encode_header,
    refuse,
)

Point = Literal["open", "write", "sync", "gather", "manifest", "rename", "renamed"]
# What a save calls at each instant where its death would leave something different behind; tests die there.
Probe = Callable[[Point], None]

Written = Sequence[Any]
"""What one rank wrote, as plain lists that can travel: [file, fields of its FileEntry, rows], where a row is [tensor,
global shape, dtype, fields of the Shard]."""


def begin(folder: Path, temporary: Path, header: Mapping[str, Any]) -> str:
    """Makes the temporary folder beside `folder`, whose parent is made too; returns its name.

    Raises CheckpointError when the header is not one, or a whole checkpoint would be replaced.
    """
    encode_header(header)
    refuse_to_replace(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    return temporary.name


def refuse_to_replace(folder: Path) -> None:
    """Raises CheckpointError when the folder is a whole checkpoint."""
    if is_whole(folder):
        raise CheckpointError(
            f"{folder} is a whole checkpoint already and is not replaced; remove or rename it, or save under "
            "another name"
        )


def joined_manifest(temporary: Path, header: Mapping[str, Any], gathered: Sequence[Written | None]) -> Manifest:
    """The manifest of what all ranks wrote; raises CheckpointError when their boxes do not tile every tensor, or a file
    is not there as it was written."""
    files: dict[str, FileEntry] = {}
    parts: dict[str, list[Shard]] = {}
    forms: dict[str, tuple[Dims, str]] = {}
    problems: list[str] = []
    for rank, written in enumerate(gathered):
        if written is None:
            continue
        name, fields, rows = written
        entry = files[name] = FileEntry(*fields)
        size = (temporary / name).stat().st_size if (temporary / name).exists() else None
        if size != entry.bytes:
            problems.append(
                f"{name}: rank {rank} wrote {entry.bytes} bytes, rank 0 sees {size}: the folder must lie on "
                "shared storage"
            )
        for tensor, dims, dtype, (file, key, offset, size_of_box, checksum) in rows:
            shape, shard = tuple(dims), Shard(file, key, tuple(offset), tuple(size_of_box), checksum)
            if forms.setdefault(tensor, (shape, dtype)) != (shape, dtype):
                problems.append(f"tensor {tensor}: {forms[tensor]} on one rank, {(shape, dtype)} on rank {rank}")
            parts.setdefault(tensor, []).append(shard)
    refuse(problems)
    tensors = {name: TensorEntry(*forms[name], tuple(shards)) for name, shards in parts.items()}
    check(tensors, files)
    return Manifest(header, tensors, files)


def commit(
    folder: Path, temporary: Path, header: Mapping[str, Any], gathered: Sequence[Written | None], probe: Probe
) -> int:
    """Checks what all ranks wrote, writes the manifest and gives the folder its name; returns the bytes of
    all files."""
    probe("gather")
    manifest = joined_manifest(temporary, header, gathered)
    data = manifest.encode()

    probe("manifest")
    unfinished = temporary / f"{MANIFEST}.tmp"
    with open(unfinished, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(unfinished, temporary / MANIFEST)
    sync_folder(temporary)
    probe("rename")
    refuse_to_replace(folder)
    if folder.exists():
        # Not whole, but it may be all that is left of something: out of the way, not deleted.
        set_aside(folder)
    os.rename(temporary, folder)
    probe("renamed")
    sync_folder(folder.parent)
    return sum(entry.bytes for entry in manifest.files.values()) + len(data)


def ignore(point: Point) -> None:
    """The probe of a save that nobody is trying to kill."""
