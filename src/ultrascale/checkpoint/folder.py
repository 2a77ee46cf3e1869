"""The folder of a run's checkpoints: which is the newest whole one, and removing old ones without ever losing
the last.

    checkpoints/step-00000010/    whole, when its manifest is valid and its files are there
    checkpoints/.step-…tmp-…      a save under way, or one that died
    checkpoints/.trash-…          being removed
    checkpoints/step-00000010.set-aside-…   moved out of the way: damaged, or of a future that the run went
                                            back from
    checkpoints/latest            the name of the newest whole one, for other programs; nothing here reads it

A checkpoint is renamed before it is deleted, so that one that is half deleted is never taken for whole.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.manifest import MANIFEST, Manifest, read_manifest

_STEP = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\..+\.tmp-[0-9a-f]{12}|\.trash-.+-[0-9a-f]{12}")
POINTER = "latest"

LEAST_FLUSHED = 1 << 20
"""Bytes: what is less is left to the sync at the end."""


def folder_name(step: int) -> str:
    """The name of the checkpoint of this step: step-00000010."""
    return f"step-{step:08d}"


def temporary_name(folder: Path) -> Path:
    """A fresh name beside the folder or file, for one that is being written; `sweep` knows it."""
    return folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:12]}")


def whole(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, in their right sizes. Checksums of the data are
    not read.

    Raises CheckpointError that says what is wrong.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name}: the file cannot be read: {error.strerror}") from error
        if size != entry.bytes:
            raise CheckpointError(f"{folder / name}: {size} bytes, the manifest says {entry.bytes}: it was truncated")
    named = _STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{folder}: its manifest is of step {manifest.step}: it was renamed, or swapped")
    return manifest


def is_whole(folder: Path) -> bool:
    """Whether the folder is a whole checkpoint, as `whole` sees it."""
    try:
        whole(folder)
    except CheckpointError:
        return False
    return True


def checkpoints(root: Path) -> Iterator[Path]:
    """The whole checkpoints of the folder, newest first; each is checked only when it is asked for."""
    for folder in _named(root):
        if is_whole(folder):
            yield folder


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint; None when there is none."""
    return next(checkpoints(root), None)


def is_step_name(name: str) -> bool:
    """Whether this is what `folder_name` gives for some step."""
    return _STEP.fullmatch(name) is not None


def step_of(folder: Path) -> int:
    """The step that the name of a checkpoint says: "step-00000010" → 10."""
    return int(folder.name.removeprefix("step-"))


def point_to(root: Path, newest: Path | None) -> None:
    """Makes `latest` name this checkpoint, or takes it away; a reader sees the old name or the new one.

    A convenience that may be one save behind after a crash: which checkpoints are whole, only the folders say.
    """
    if newest is None:
        (root / POINTER).unlink(missing_ok=True)
        return
    unfinished = temporary_name(root / POINTER)
    with open(unfinished, "x") as file:
        file.write(f"{newest.name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.rename(unfinished, root / POINTER)
    sync_folder(root)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest whole one of a run folder; raises CheckpointError when it is neither."""
    if (path / "checkpoints").is_dir():
        found = latest(path / "checkpoints")
        if found is None:
            raise CheckpointError(f"{path} holds no whole checkpoint")
        return found
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is neither a run folder nor a checkpoint")
    return path


def named(path: Path) -> list[Path]:
    """All that is named like a checkpoint in a run folder, or in its checkpoints/, whole or not; newest first."""
    return _named(path / "checkpoints") or _named(path)


def torn(root: Path) -> list[CheckpointError]:
    """Why each folder that is named like a checkpoint, and is newer than the newest whole one, is not
    taken."""
    reasons = []
    for folder in _named(root):
        try:
            whole(folder)
        except CheckpointError as error:
            reasons.append(error)
        else:
            break
    return reasons


def remove(folder: Path, *, probe: Callable[[Literal["trash", "trashed"]], None] = lambda point: None) -> None:
    """Removes a checkpoint: renamed first, then deleted.

    Raises CheckpointError when it is the only whole one beside it, or cannot be removed.
    """
    others = (other for other in checkpoints(folder.parent) if other.name != folder.name)
    if next(others, None) is None and is_whole(folder):
        raise CheckpointError(f"{folder} is the only whole checkpoint of {folder.parent}; it is kept")
    trash = folder.with_name(f".trash-{folder.name}-{uuid.uuid4().hex[:12]}")
    try:
        probe("trash")
        os.rename(folder, trash)
        sync_folder(folder.parent)
        probe("trashed")
        shutil.rmtree(trash)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be removed: {error}") from error


def surplus(whole_ones: Sequence[Path], keep: int | None, keep_every: int | None = None) -> list[Path]:
    """Those of the whole checkpoints (newest first) that are neither among the newest `keep` (None: all) nor of a step
    that is a multiple of `keep_every`; oldest first. Raises CheckpointError when keep is below 1."""
    if keep is None:
        return []
    if keep < 1:
        raise CheckpointError(f"checkpoint.keep={keep}: at least 1 is kept; use 1 or more, or null for all")
    return [f for f in whole_ones[keep:] if keep_every is None or step_of(f) % keep_every][::-1]


def retain(root: Path, keep: int | None, keep_every: int | None = None, spare: Collection[str] = ()) -> list[Path]:
    """Removes the whole checkpoints that are `surplus`, but for those named in `spare`; returns those removed.

    Folders that are not whole are not counted and not touched: they may be all that is left of something. One
    process calls it, after a save. Raises CheckpointError when keep is below 1 or a folder cannot be removed.
    """
    # Oldest first: a run that dies here has lost nothing that the next retention would have kept.
    whole_ones = [] if keep is None else list(checkpoints(root))
    old = [f for f in surplus(whole_ones, keep, keep_every) if f.name not in spare]
    for folder in old:
        remove(folder)
    return old


def sweep(root: Path) -> list[Path]:
    """Deletes what saves and removals that died have left behind. One process calls it, at start, while
    nothing is saved."""
    if not root.is_dir():
        return []
    found = sorted(path for path in root.iterdir() if _LEFT_OVER.fullmatch(path.name))
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def set_aside(folder: Path) -> Path:
    """Renames a folder so that no reader takes it for a checkpoint and a save may use its name; returns where
    it is now.

    For what must not be deleted unseen: a checkpoint that turned out to be damaged.
    """
    aside = folder.with_name(f"{folder.name}.set-aside-{uuid.uuid4().hex[:12]}")
    os.rename(folder, aside)
    sync_folder(folder.parent)
    return aside


def set_aside_after(root: Path, step: int) -> list[Path]:
    """Sets aside every checkpoint of a later step: a run that went back to `step` must not resume into its
    old future."""
    return [set_aside(folder) for folder in _named(root) if step_of(folder) > step]


def begin_flush(descriptor: int, start: int, count: int) -> None:
    """Has the disk begin with bytes of a file that were written, and returns: left to itself, the system waits for the
    sync at the end, and processor and disk take turns. A sync on the way would hold up those that write meanwhile.
    """
    if count >= LEAST_FLUSHED and hasattr(os, "posix_fadvise"):  # macOS has none
        # Linux starts to write what is not on disk yet, and drops what is (mm/fadvise.c).
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Forces the folder's entries (names made, renamed, removed) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    steps = [(int(m[1]), path) for path in root.iterdir() if (m := _STEP.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]
