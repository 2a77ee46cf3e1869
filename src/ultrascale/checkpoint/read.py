"""Loading: any box of any tensor, from whatever boxes the files hold.

A rank reads the bytes of the boxes it needs, where it can to where they belong, and hashes the shards that it needs
whole. Of other shards the rest is read only to be hashed, and where many ranks load together each of those is hashed by
one of them. Nothing is believed: sizes, headers, ranges and checksums are compared with the manifest before a value is
used.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch

from ultrascale.checkpoint.boxes import Box, CheckpointError, Dims, intersection, pieces, slices
from ultrascale.checkpoint.manifest import Manifest, Shard, read_manifest, refuse
from ultrascale.checkpoint.safetensors_file import width
from ultrascale.checkpoint.scan import scan_place
from ultrascale.checkpoint.stored import FileOfShards, Place, Reader, StoredTensor
from ultrascale.checkpoint.values import UNSIGNED, Bits
from ultrascale.checkpoint.write import DTYPE_NAMES

Verify = Literal["full", "sampled", "off"]

# `sampled` hashes at least one shard of each file that is touched, and about one in so many of the others.
SAMPLED_ONE_IN = 8

THREADS = 2
"""That read and hash at once, on each rank."""

BLOCK_BYTES = 8 << 20
"""Read at a time, and hashed while it is in the processor's cache."""

_TORCH = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of so many bytes: numpy has no bfloat16."""


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

    # file → shard → boxes that need some of it: each file is opened once, each shard hashed once.
    plan: dict[str, dict[Shard, list[Box]]] = defaultdict(lambda: defaultdict(list))
    for box in wanted:
        for shard in manifest.tensors[box.name].shards:
            if intersection(shard.offset, shard.shape, box.offset, tuple(box.tensor.shape)):
                plan[shard.file][shard].append(box)

    hashed = _to_hash(manifest, plan, verify, among)
    for shard in hashed:
        plan[shard.file][shard] += []  # some are nobody's here, and hashed all the same
    owners = {shard: name for name, entry in manifest.tensors.items() for shard in entry.shards}
    with ThreadPoolExecutor(THREADS) as pool:
        for file_name, shards in sorted(plan.items()):
            file = FileOfShards(folder / file_name, manifest.files[file_name])
            places = {s: file.place(s, manifest.tensors[owners[s]].dtype, owners[s]) for s in shards}
            with Reader() as reader:
                reader.open(file.path)  # here, not in two threads at once

                def work(shard: Shard, places: Mapping[Shard, Place] = places, reader: Reader = reader) -> None:
                    name, boxes = owners[shard], plan[shard.file][shard]
                    _read(reader, places[shard], name, manifest.tensors[name].dtype, boxes, shard in hashed)

                # Reads, copies and hashes let go of the interpreter's lock; boxes of different shards share no element.
                # In the file's order, for what lies ahead is on its way from the disk.
                for _ in pool.map(work, sorted(shards, key=lambda shard: places[shard].start)):
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


def _read(reader: Reader, place: Place, name: str, dtype: str, boxes: Sequence[Box], hashed: bool) -> None:
    """Fills what the boxes want of a place; `hashed`: and compares the checksum of all of it."""
    checksum = None
    for box in boxes:
        all_of_it = _common(place, box) == (place.offset, place.shape)
        sha = hashlib.sha256() if hashed and all_of_it and checksum is None else None
        _copy(reader, place, dtype, box, sha)
        checksum = f"sha256:{sha.hexdigest()}" if sha else checksum
    if hashed:
        _verify(place, name, checksum or scan_place(StoredTensor(place.shape, dtype, (place,)), place, False).checksum)


def _common(place: Place, box: Box) -> tuple[Dims, Dims]:
    common = intersection(place.offset, place.shape, box.offset, tuple(box.tensor.shape))
    assert common is not None, "the plan holds only shards that the box needs"
    return common


def _copy(reader: Reader, place: Place, dtype: str, box: Box, sha: Any) -> None:
    """Fills what the box wants of a place, and tells `sha` (None: nobody) of its bytes."""
    here = box.tensor.detach()
    size = width(dtype)
    # What lies in this memory as it lies in the file is read to where it belongs.
    at_once = here.device.type == "cpu" and DTYPE_NAMES[here.dtype] == dtype
    for offset, shape in pieces(*_common(place, box), BLOCK_BYTES // size):
        values = here[slices(offset, shape, box.offset)]
        bits = values.view(_INTEGERS[size]).numpy() if at_once else np.empty(shape, UNSIGNED[size])
        reader.fill(place, tuple(o - first for o, first in zip(offset, place.offset)), shape, bits)
        if sha is not None:
            sha.update(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
        if not at_once:
            values.copy_(as_tensor(bits, _TORCH[dtype]))


def as_tensor(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous bits as a tensor of their shape, in the same memory: through bytes, for numpy has no bfloat16."""
    return torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(dtype).reshape(bits.shape)


def _verify(place: Place, name: str, checksum: str) -> None:
    """Raises CheckpointError when the place's bytes are not those that were written."""
    if checksum != place.checksum:
        raise CheckpointError(f"{place.file}: checksum of tensor {name} (key {place.key!r}) does not match: damaged")
