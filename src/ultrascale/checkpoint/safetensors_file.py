"""The safetensors format, byte by byte: the head of a file that is written, of one that the manifest vouches for, and
of a stranger's. Needs no torch.

A file is a length word (8 bytes, little endian), a JSON header of that length, and the tensors' bytes one after
another. The header maps a key to dtype, shape and the range of its bytes behind the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ultrascale.checkpoint.boxes import CheckpointError, Dims, elements
from ultrascale.checkpoint.manifest import DTYPES, MAX_ELEMENTS, FileEntry, Shard, digest, parse_json

METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

_NAMES = {code: (name, width) for name, (code, width) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor of a file: a dtype of the manifest's DTYPES, and its bytes, counted from the file's beginning."""

    dtype: str
    shape: Dims
    start: int
    stop: int


def width(dtype: str) -> int:
    """Bytes of one element."""
    return DTYPES[dtype][1]


def shard_key(name: str, whole: Dims, offset: Dims, shape: Dims) -> str:
    """The key of a box in its file: the tensor's name, and the range of each dim unless it is the whole tensor."""
    if shape == whole:
        return name
    return f"{name}[{','.join(f'{o}:{o + n}' for o, n in zip(offset, shape))}]"


def make_head(
    tensors: Mapping[str, tuple[str, Dims]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Kept]]:
    """Length word and header of a file of these tensors, key → (dtype, shape), and where each of them goes.

    Larger elements first, as the safetensors library does, so that every tensor is aligned to its own element.
    """
    order = sorted(tensors, key=lambda key: (-width(tensors[key][0]), key))
    head: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for key in order:
        dtype, shape = tensors[key]
        start, end = end, end + elements(shape) * width(dtype)
        head[key] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    kept = {}
    for key in order:
        start, end = head[key]["data_offsets"]
        kept[key] = Kept(*tensors[key], len(prefix) + start, len(prefix) + end)
    return prefix, kept


def vouched_head(path: Path, entry: FileEntry) -> tuple[int, dict[str, Any]]:
    """(where the data begin, header) of a checkpoint's file; raises CheckpointError when it is not the one that the
    manifest vouches for."""
    if not path.is_file():
        raise CheckpointError(f"{path}: the file is missing")
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size != entry.bytes:
                raise CheckpointError(
                    f"{path}: {size} bytes, the manifest says {entry.bytes}: it was truncated, or is another file"
                )
            file.seek(0)
            word = file.read(8)
            length = int.from_bytes(word, "little")
            head = file.read(length) if 8 + length <= size else b""
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read: {error}") from error
    if len(head) != length or digest(word + head) != entry.header:
        raise CheckpointError(f"{path}: the header is not the one that was written: damaged, or another file")
    try:
        return 8 + length, json.loads(head)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from error


def locate(
    path: Path, data: int, header: Mapping[str, Any], file_bytes: int, shard: Shard, dtype: str, name: str
) -> int:
    """The first byte of a shard in its file; raises CheckpointError when the header describes something else than the
    manifest does.

    data   where the data begin
    """
    code, size_of_element = DTYPES[dtype]
    try:
        found = header[shard.key]
        start, end = (int(n) for n in found["data_offsets"])
        same = found["dtype"] == code and found["shape"] == list(shard.shape)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: key {shard.key!r} of tensor {name} is missing or malformed") from None
    size = elements(shard.shape) * size_of_element
    if not same or start < 0 or end - start != size or data + end > file_bytes:
        raise CheckpointError(
            f"{path}: key {shard.key!r} of tensor {name} is {_short(found)}; the manifest says {code} of shape "
            f"{list(shard.shape)}"
        )
    return data + start


def read_head(path: Path) -> dict[str, Kept]:
    """The tensors of a file that no manifest vouches for, checked as if an enemy had written it.

    Raises CheckpointError that names the file and what is wrong: ranges that leave the file, overlap or leave gaps,
    sizes that do not fit, a dtype that is not one of DTYPES.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(f"{path}: not a safetensors file, or truncated: its header does not fit in it")
            head = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read: {error.strerror or error}") from error
    try:
        header = parse_json(head)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: the header is {error}") from error
    header.pop(METADATA, None)
    kept = {key: _kept(path, key, found, 8 + length) for key, found in header.items()}
    end = 8 + length
    for key, tensor in sorted(kept.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise CheckpointError(f"{path}: the bytes of {key} begin at {tensor.start}, those before end at {end}")
        end = tensor.stop
    if end != size:
        raise CheckpointError(f"{path}: {size} bytes, its header describes {end}: truncated, or damaged")
    return kept


def _kept(path: Path, key: str, found: Any, data: int) -> Kept:
    try:
        code, shape, (start, stop) = found["dtype"], found["shape"], found["data_offsets"]
        sizes = [*shape, start, stop]
        whole = len(found) == 3 and all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in sizes)
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: the entry of key {key!r} is malformed: {_short(found)}")
    if code not in _NAMES:
        raise CheckpointError(f"{path}: {key} has dtype {_short(code)}, which is none of {', '.join(_NAMES)}")
    dtype, size = _NAMES[code]
    if prod(shape) > MAX_ELEMENTS or stop - start != prod(shape) * size:
        raise CheckpointError(f"{path}: {key} of shape {shape} and dtype {code} does not fill {stop - start} bytes")
    return Kept(dtype, tuple(shape), data + start, data + stop)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
