"""What is in a checkpoint, is it whole, and what tells two apart: read in blocks, in little memory. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ultrascale.checkpoint.boxes import CheckpointError, pieces
from ultrascale.checkpoint.folder import whole
from ultrascale.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from ultrascale.checkpoint.safetensors_file import width
from ultrascale.checkpoint.scan import Scan, joined, scan_all
from ultrascale.checkpoint.stored import Places, Reader, Stored, StoredTensor, stored_tensors
from ultrascale.checkpoint.values import FLOATING, Bits, numbers

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""

COMPARED_BYTES = 1 << 20
"""Of each side at a time."""


def total_bytes(stored: Stored) -> int:
    """Of all tensors."""
    return sum(tensor.bytes for tensor in stored.values())


def scans(stored: Stored, progress: Progress | None = None) -> dict[str, Scan]:
    """The scan of every tensor, over all its places."""
    places = [(tensor, place) for tensor in stored.values() for place in tensor.places]
    found = iter(scan_all(places, True, _counter(total_bytes(stored), progress)))
    return {name: joined([next(found) for _ in tensor.places]) for name, tensor in stored.items()}


def _counter(total: int, progress: Progress | None) -> Callable[[int], None] | None:
    if progress is None:
        return None
    done, lock = 0, Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(done, total)

    return advance


# ---- inspect --------------------------------------------------------------------------------------------------------


def layout_of(manifest: Manifest) -> dict[str, Any]:
    """Axes larger than 1, and ZeRO stage, that the checkpoint was saved under."""
    axes = {axis: size for axis, size in dict(manifest.header.get("axes") or {}).items() if size != 1}
    parallel = manifest.header["config"].get("parallel") or {}
    return axes | ({"zero_stage": parallel["zero_stage"]} if parallel.get("zero_stage") else {})


def describe(folder: Path, norms: bool, progress: Progress | None = None) -> dict[str, Any]:
    """What a checkpoint says of itself and holds; with `norms`, also of its values, which are read for it.

    Raises CheckpointError when the folder is no checkpoint, or a file is missing or cut.
    """
    manifest = read_manifest(folder)
    stored = stored_tensors(folder, manifest)
    found = scans(stored, progress) if norms else {}
    return {
        "path": str(folder),
        "step": manifest.step,
        "layout": layout_of(manifest),
        "axes": manifest.header.get("axes"),
        "versions": manifest.header.get("versions"),
        "files": len(manifest.files),
        "bytes": total_bytes(stored),
        "tensors": [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "bytes": tensor.bytes,
                "shards": len(tensor.places),
            }
            | ({"norm": found[name].norm, "largest": found[name].largest} if norms and _floating(tensor) else {})
            for name, tensor in stored.items()
        ],
    }


def _floating(tensor: StoredTensor) -> bool:
    return tensor.dtype in FLOATING


# ---- check ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """The result of reading a checkpoint whole; it is whole when there are no problems."""

    path: str
    step: int | None
    tensors: int
    bytes: int
    problems: tuple[str, ...]
    notices: tuple[str, ...] = ()


def check(folder: Path, progress: Progress | None = None) -> Checked:
    """Reads every byte: manifest, files, headers, checksums, and whether all values are finite."""
    try:
        manifest = whole(folder)
        stored = stored_tensors(folder, manifest)
    except CheckpointError as error:
        return Checked(str(folder), None, 0, 0, tuple(str(error).splitlines()))
    problems = []
    places = [(name, tensor, place) for name, tensor in stored.items() for place in tensor.places]
    results = scan_all([(tensor, place) for _, tensor, place in places], True, _counter(total_bytes(stored), progress))
    bad: dict[str, list[Scan]] = {}
    try:
        for (name, _, place), scan in zip(places, results, strict=True):
            if scan.checksum != place.checksum:
                problems.append(f"{place.file}: checksum of tensor {name} (key {place.key!r}) does not match: damaged")
            if scan.not_finite:
                bad.setdefault(name, []).append(scan)
    except CheckpointError as error:
        problems.append(str(error))
    for name, scans_of_it in bad.items():
        scan = joined(scans_of_it)
        count = f"{scan.not_finite} value{'s are' if scan.not_finite > 1 else ' is'}"
        problems.append(f"tensor {name}: {count} not finite, the first at {list(scan.first or ())}")
    known = {*manifest.files, MANIFEST}
    others = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in known)
    notices = [f"{folder / name}: not part of the checkpoint" for name in others]
    return Checked(str(folder), manifest.step, len(stored), total_bytes(stored), tuple(problems), tuple(notices))


# ---- diff -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one tensor in two checkpoints."""

    name: str
    what: str
    """What differs beside values: where it is, shape, dtype."""
    compared: bool = False
    """Whether the values were compared: not where the shapes differ, or one side lacks it."""
    relative: float = 0.0
    """Largest |a − b| over the largest |value| of the tensor; infinite where one is finite and the other is not."""
    absolute: float = 0.0
    elements: int = 0
    """That differ, bit by bit where the dtypes are the same."""


def compare(a: Stored, b: Stored, progress: Progress | None = None) -> list[Difference]:
    """The tensors that differ, by name; those that are equal bit for bit are not listed.

    Where the dtypes differ, values are compared.
    """
    both = [name for name in a if name in b and a[name].shape == b[name].shape]
    advance = _counter(sum(a[name].bytes for name in both), progress)
    found = [Difference(name, "only in A") for name in a if name not in b]
    found += [Difference(name, "only in B") for name in b if name not in a]
    for name in a:
        if name in b and a[name].shape != b[name].shape:
            found.append(Difference(name, f"shape {list(a[name].shape)} in A, {list(b[name].shape)} in B"))
    with Reader() as reader:
        for name in both:
            difference = _compare(name, a[name], b[name], reader, advance)
            if difference is not None:
                found.append(difference)
    return sorted(found, key=lambda difference: difference.name)


def _compare(
    name: str, a: StoredTensor, b: StoredTensor, reader: Reader, advance: Callable[[int], None] | None
) -> Difference | None:
    count, absolute, largest = 0, 0.0, 0.0
    for bits_a, bits_b in _both(a, b, reader):
        differing = _differing(bits_a, a.dtype, bits_b, b.dtype)
        count += int(differing.sum())
        x = numbers(bits_a, a.dtype).astype(np.float64)
        y = numbers(bits_b, b.dtype).astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        if (differing & ~finite).any():
            absolute = inf
        x, y = x[finite], y[finite]
        absolute = max(absolute, float(np.abs(x - y).max(initial=0.0)))
        largest = max(largest, float(np.abs(x).max(initial=0.0)), float(np.abs(y).max(initial=0.0)))
        if advance is not None:
            advance(bits_a.nbytes)
    if count == 0 and a.dtype == b.dtype:
        return None
    relative = absolute / largest if largest else absolute
    what = "" if a.dtype == b.dtype else f"dtype {a.dtype} in A, {b.dtype} in B"
    return Difference(name, what, True, relative, absolute, count)


def _both(a: StoredTensor, b: StoredTensor, reader: Reader) -> Iterator[tuple[Bits, Bits]]:
    limit = COMPARED_BYTES // max(width(a.dtype), width(b.dtype))
    of_b = Places(b)
    of_a = Places(a)
    for box in a.boxes():
        own, other = of_a.touching(*box), of_b.touching(*box)
        for offset, shape in pieces(*box, limit):
            yield reader.box(own, offset, shape), reader.box(other, offset, shape)


def _differing(bits_a: Bits, dtype_a: str, bits_b: Bits, dtype_b: str) -> Any:
    if dtype_a == dtype_b:
        return bits_a != bits_b
    x, y = numbers(bits_a, dtype_a), numbers(bits_b, dtype_b)
    return (x != y) & ~(np.isnan(x) & np.isnan(y))
