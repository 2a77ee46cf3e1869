"""Loading: any box of any tensor, from whatever boxes the files hold.

Files are mapped, not read: a rank touches the bytes of the boxes it needs, and hashes the shards that it needs whole.
Of other shards the rest is read only to be hashed, and where many ranks load together each of those is hashed by one
of them. Nothing is believed: sizes, headers, ranges and checksums are compared with the manifest before a value is
used.
"""

from __future__ import annotations

import hashlib
import mmap
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Literal
from zlib import crc32

import torch

from ultrascale.checkpoint.boxes import Box, CheckpointError, intersection, slices
from ultrascale.checkpoint.manifest import FileEntry, Manifest, Shard, digest, read_manifest, refuse
from ultrascale.checkpoint.safetensors_file import locate, vouched_head
from ultrascale.checkpoint.write import DTYPE_NAMES

Verify = Literal["full", "sampled", "off"]

# `sampled` hashes at least one shard of each file that is touched, and about one in so many of the others.
SAMPLED_ONE_IN = 8

THREADS = 2
"""That hash and copy at once, on each rank."""

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
    widen: bool = False,
    among: tuple[int, int] = (0, 1),
) -> Manifest:
    """Fills the tensors of the wanted boxes, in place, from a checkpoint saved under any layout. Not
    collective.

    verify    full: the checksum of every shard that is touched; sampled: of some of them; off: of none.
              Sizes, headers and the manifest's own checksum are checked always.
    manifest  of this folder, when the caller has opened it already
    claimed   all names that the whole job wants; when given, names that are missing and names that are left
              over are errors
    widen     take a tensor of another dtype too, which the caller has found to hold every value
    among     (index, number) of this rank and those that load the same checkpoint together and fail together: a shard
              that this rank needs a part of is hashed by one of them, in turn
    returns   the manifest

    Raises CheckpointError that names every tensor that is missing, left over, or of another shape or dtype,
    before anything is read; or the file that is missing or damaged, in which case the wanted tensors are
    partly filled: do not use them.
    """
    if verify not in ("full", "sampled", "off"):
        raise CheckpointError(f"checkpoint.verify={verify}: one of full, sampled, off is wanted")
    manifest = manifest or open_manifest(folder)
    wanted = list(wanted)
    refuse(_mismatches(folder, manifest, wanted, claimed, widen))

    # file → shard → boxes that need some of it: each file is mapped once, each shard hashed once.
    plan: dict[str, dict[Shard, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for box in wanted:
        for shard in manifest.tensors[box.name].shards:
            if intersection(shard.offset, shard.shape, box.offset, tuple(box.tensor.shape)):
                plan[shard.file][shard].append(box)

    hashed = _to_hash(manifest, plan, verify, among)
    for shard in hashed:
        plan[shard.file][shard] += []  # some are nobody's here, and hashed all the same
    names = {shard: name for name, entry in manifest.tensors.items() for shard in entry.shards}
    with ThreadPoolExecutor(THREADS) as pool:
        for name, shards in sorted(plan.items()):
            with _ShardFile(folder, name, manifest.files[name]) as file:
                for shard in shards:
                    file.locate(shard, manifest.tensors[names[shard]].dtype, names[shard])

                def work(item: tuple[Shard, list[Box]], file: _ShardFile = file) -> None:
                    shard, boxes = item
                    if shard in hashed:
                        file.verify(shard, names[shard])
                    for box in boxes:
                        _copy(file, shard, box)

                # Copies and hashes let go of the interpreter's lock; boxes of different shards share no element.
                for _ in pool.map(work, shards.items()):
                    pass
    return manifest


def _mismatches(
    folder: Path, manifest: Manifest, wanted: list[Box], claimed: Collection[str] | None, widen: bool
) -> Iterable[str]:
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
        if entry.dtype != dtype and not widen:
            told.add(box.name)
            yield f"{folder}: tensor {box.name} has dtype {entry.dtype}, this run wants {dtype}"


def _to_hash(
    manifest: Manifest, plan: Mapping[str, Mapping[Shard, list[Box]]], verify: Verify, among: tuple[int, int]
) -> set[Shard]:
    """The shards whose checksums this rank compares."""
    index, ranks = among
    if ranks == 1:
        return {shard for shards in plan.values() for shard in _chosen(shards, verify, manifest.step)}
    # Of all that the job reads, since a rank does not know what the others need; the same choice on every rank.
    of_file: dict[str, list[Shard]] = defaultdict(list)
    for _, entry in sorted(manifest.tensors.items()):
        for shard in entry.shards:
            of_file[shard.file].append(shard)
    chosen = {shard for shards in of_file.values() for shard in _chosen(shards, verify, manifest.step)}
    whole = {
        shard
        for shards in plan.values()
        for shard, boxes in shards.items()
        if any(
            intersection(shard.offset, shard.shape, b.offset, tuple(b.tensor.shape)) == (shard.offset, shard.shape)
            for b in boxes
        )
    }
    return {shard for shard in chosen if shard in whole or _turn(shard, ranks) == index}


def _turn(shard: Shard, ranks: int) -> int:
    """Which of the ranks hashes a shard that none of them may need whole."""
    return crc32(f"{shard.file}/{shard.key}".encode()) % ranks


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
        self._placed: dict[Shard, tuple[int, int]] = {}
        self._tensors: dict[Shard, torch.Tensor] = {}

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
        self._tensors.clear()
        del self._map

    def locate(self, shard: Shard, dtype: str, name: str) -> None:
        """Finds the shard's bytes; raises CheckpointError when the file's header describes something else."""
        start, size = locate(self.path, self._data, self._header, self._entry.bytes, shard, dtype, name)
        self._placed[shard] = (start, size)
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; this one is only ever copied from.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)
        self._tensors[shard] = flat.view(_TORCH[dtype]).reshape(shard.shape)

    def verify(self, shard: Shard, name: str) -> None:
        """Raises CheckpointError when the shard's bytes are not those that were written."""
        start, size = self._placed[shard]
        with memoryview(self._map) as whole, whole[start : start + size] as data:
            if digest(data) != shard.checksum:
                raise CheckpointError(
                    f"{self.path}: checksum of tensor {name} (key {shard.key!r}) does not match: damaged"
                )

    def tensor(self, shard: Shard) -> torch.Tensor:
        """The shard as a tensor on the mapping; valid while the file is open."""
        return self._tensors[shard]
