"""Loading: any box of any tensor, from whatever boxes the files hold.

Files are mapped, not read: a rank touches the bytes of the boxes it needs, and, with `verify="full"`, the
rest of those shards once, to hash them. Nothing is believed: sizes, headers, ranges and checksums are
compared with the manifest before a value is used.
"""

from __future__ import annotations

import hashlib
import mmap
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from ultrascale.checkpoint.boxes import Box, CheckpointError, intersection, slices
from ultrascale.checkpoint.manifest import FileEntry, Manifest, Shard, digest, read_manifest, refuse
from ultrascale.checkpoint.safetensors_file import locate, vouched_head
from ultrascale.checkpoint.write import DTYPE_NAMES

Verify = Literal["full", "sampled", "off"]

# `sampled` hashes at least one shard of each file that is touched, and about one in so many of the others.
SAMPLED_ONE_IN = 8

_TORCH = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def open_manifest(folder: Path) -> Manifest:
    """The checked manifest of a checkpoint folder; raises CheckpointError when the folder is not a whole
    checkpoint's."""
    return read_manifest(folder)


def unclaimed(manifest: Manifest, names: Collection[str]) -> list[str]:
    """Tensors of the checkpoint that nobody asks for, sorted. `names` are all names that the whole job wants,
    not one rank's."""
    return sorted(set(manifest.tensors) - set(names))


def load(
    folder: Path,
    wanted: Iterable[Box],
    verify: Verify = "full",
    *,
    manifest: Manifest | None = None,
    claimed: Collection[str] | None = None,
) -> Manifest:
    """Fills the tensors of the wanted boxes, in place, from a checkpoint saved under any layout. Not
    collective.

    verify    full: the checksum of every shard that is touched; sampled: of some of them; off: of none.
              Sizes, headers and the manifest's own checksum are checked always.
    manifest  of this folder, when the caller has opened it already
    claimed   all names that the whole job wants; when given, names that are missing and names that are left
              over are errors
    returns   the manifest

    Raises CheckpointError that names every tensor that is missing, left over, or of another shape or dtype,
    before anything is read; or the file that is missing or damaged, in which case the wanted tensors are
    partly filled: do not use them.
    """
    if verify not in ("full", "sampled", "off"):
        raise CheckpointError(f"checkpoint.verify={verify}: one of full, sampled, off is wanted")
    manifest = manifest or open_manifest(folder)
    wanted = list(wanted)
    refuse(_mismatches(folder, manifest, wanted, claimed))

    # file → shard → boxes that need some of it: each file is mapped once, each shard hashed once.
    plan: dict[str, dict[Shard, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for box in wanted:
        for shard in manifest.tensors[box.name].shards:
            if intersection(shard.offset, shard.shape, box.offset, tuple(box.tensor.shape)):
                plan[shard.file][shard].append(box)

    for name, shards in sorted(plan.items()):
        hashed = _chosen(shards, verify, manifest.step)
        with _ShardFile(folder, name, manifest.files[name]) as file:
            for shard, boxes in shards.items():
                file.locate(shard, manifest.tensors[boxes[0].name].dtype, boxes[0].name)
                if shard in hashed:
                    file.verify(shard, boxes[0].name)
                for box in boxes:
                    _copy(file, shard, box)
    return manifest


def _mismatches(folder: Path, manifest: Manifest, wanted: list[Box], claimed: Collection[str] | None) -> Iterable[str]:
    missing = {box.name for box in wanted} | set(claimed or ())
    for name in sorted(missing - set(manifest.tensors)):
        yield f"{folder}: tensor {name} is missing from the checkpoint"
    if claimed is not None:
        for name in unclaimed(manifest, claimed):
            yield f"{folder}: tensor {name} of the checkpoint is not part of this run"
    told = set()
    for box in wanted:
        entry = manifest.tensors.get(box.name)
        if entry is None or box.name in told:
            continue
        dtype = DTYPE_NAMES.get(box.tensor.dtype, str(box.tensor.dtype))
        if entry.shape != box.shape:
            told.add(box.name)
            has, wants = list(entry.shape), list(box.shape)
            yield f"{folder}: tensor {box.name} has shape {has}, this run wants {wants}"
        if entry.dtype != dtype:
            told.add(box.name)
            yield f"{folder}: tensor {box.name} has dtype {entry.dtype}, this run wants {dtype}"


def _chosen(shards: Collection[Shard], verify: Verify, step: int) -> set[Shard]:
    if verify == "off":
        return set()
    if verify == "full":
        return set(shards)

    # Keyed by the step, so that successive checkpoints of a run have different shards looked at.
    def draw(shard: Shard) -> int:
        text = f"{step}/{shard.file}/{shard.key}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")

    return {min(shards, key=draw)} | {shard for shard in shards if draw(shard) % SAMPLED_ONE_IN == 0}


def _copy(file: _ShardFile, shard: Shard, box: Box) -> None:
    common = intersection(shard.offset, shard.shape, box.offset, tuple(box.tensor.shape))
    assert common is not None, "the plan holds only shards that the box needs"
    source = file.tensor(shard)
    with torch.no_grad():
        box.tensor.detach()[slices(*common, box.offset)].copy_(source[slices(*common, shard.offset)])


class _ShardFile:
    """A safetensors file mapped into memory, whose header is the one that the manifest vouches for."""

    def __init__(self, folder: Path, name: str, entry: FileEntry) -> None:
        self.path = folder / name
        self._entry = entry
        self._placed: dict[Shard, tuple[int, int, torch.dtype]] = {}

    def __enter__(self) -> _ShardFile:
        self._data, self._header = vouched_head(self.path, self._entry)
        try:
            with open(self.path, "rb") as file:
                # Read-only: a private writable mapping of a file larger than memory may be refused.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: the file cannot be read: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The mapping goes when the last tensor on it does: closing it under a tensor that a traceback still
        # holds fails.
        del self._map

    def locate(self, shard: Shard, dtype: str, name: str) -> None:
        """Finds the shard's bytes; raises CheckpointError when the file's header describes something else."""
        start, size = locate(self.path, self._data, self._header, self._entry.bytes, shard, dtype, name)
        self._placed[shard] = (start, size, _TORCH[dtype])

    def verify(self, shard: Shard, name: str) -> None:
        """Raises CheckpointError when the shard's bytes are not those that were written."""
        start, size, _ = self._placed[shard]
        with memoryview(self._map) as whole, whole[start : start + size] as data:
            if digest(data) != shard.checksum:
                raise CheckpointError(
                    f"{self.path}: checksum of tensor {name} (key {shard.key!r}) does not match: damaged"
                )

    def tensor(self, shard: Shard) -> torch.Tensor:
        """The shard as a tensor on the mapping; valid while the file is open."""
        start, size, dtype = self._placed[shard]
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; this one is only ever copied from.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)
        return flat.view(dtype).reshape(shard.shape)
