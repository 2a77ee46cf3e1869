"""The manifest: which tensors a checkpoint holds, and where each box of each of them lies. No torch, no
pickle: JSON.

`manifest.json` is UTF-8. Its first line is `{"checksum": "sha256:<64 hex digits>",` and the digits are the
SHA-256 of every byte after that line's newline, so that no bit of the file can change unseen. The rest of the
object:

    schema_version   1
    step, config, data_position, axes, ties, …   the header that the run gives: any JSON
    files      {file: {bytes, header}}: size of the safetensors file, SHA-256 of its first 8 + N bytes (length
               and JSON header)
    tensors    {name: {shape, dtype, shards: [{file, key, offset, shape, checksum}]}}; a shard is a box of the
               tensor, stored under `key` in `file`, and `checksum` is the SHA-256 of its bytes

The boxes of each tensor hold each element exactly once. All that is read is checked as if an enemy had
written it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ultrascale.checkpoint.boxes import MAX_DIMS, CheckpointError, Dims, elements, inside, untiled

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"

HEADER_KEYS = ("step", "config", "data_position", "axes", "ties")
OWN_KEYS = ("checksum", "schema_version", "files", "tensors")

# Manifest dtype → (safetensors code, bytes per element).
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}

# A million shards take some 200 MB; what is larger than this is no manifest.
MAX_BYTES = 1 << 30
MAX_ELEMENTS = 1 << 62

_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}")
_FIRST_LINE = re.compile(rb'\{"checksum": "(sha256:[0-9a-f]{64})",\n')
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.safetensors")


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored box: it begins at `offset` of the tensor and lies under `key` in `file`; checksum "sha256:…"
    of its bytes."""

    file: str
    key: str
    offset: Dims
    shape: Dims
    checksum: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A logical tensor: global shape, dtype (a key of DTYPES), and the shards that tile it."""

    shape: Dims
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A safetensors file: its size in bytes, and the checksum of its length word and JSON header."""

    bytes: int
    header: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds; `header` has the run's own keys (step, config, data_position, axes, ties,
    …)."""

    header: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return int(self.header["step"])

    def encode(self) -> bytes:
        """The bytes of manifest.json."""
        body = encode_header(self.header)
        body["files"] = {f: {"bytes": e.bytes, "header": e.header} for f, e in sorted(self.files.items())}
        body["tensors"] = {
            name: {
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "shards": [
                    {
                        "file": s.file,
                        "key": s.key,
                        "offset": list(s.offset),
                        "shape": list(s.shape),
                        "checksum": s.checksum,
                    }
                    for s in entry.shards
                ],
            }
            for name, entry in sorted(self.tensors.items())
        }
        # One line per entry of a table: a person can read it, and `grep` finds a tensor.
        parts = []
        for key, value in body.items():
            if key in ("files", "tensors"):
                rows = ",\n".join(f"  {_dump(k)}: {_dump(v)}" for k, v in value.items())
                parts.append(f"{_dump(key)}: {{\n{rows}\n}}" if rows else f"{_dump(key)}: {{}}")
            else:
                parts.append(f"{_dump(key)}: {_dump(value)}")
        rest = (",\n".join(parts) + "\n}\n").encode()
        return f'{{"checksum": "{digest(rest)}",\n'.encode() + rest


def digest(data: bytes | memoryview) -> str:
    """SHA-256 of the bytes, as the manifest writes it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def encode_header(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header with its schema version in front; raises CheckpointError when it is not what a manifest may
    begin with."""
    missing = [key for key in HEADER_KEYS if key not in header]
    taken = [key for key in OWN_KEYS if key in header]
    step = header.get("step")
    if missing or taken:
        raise CheckpointError(
            f"checkpoint header: missing keys {missing}, keys that the manifest writes itself {taken}"
        )
    if type(step) is not int or step < 0:
        raise CheckpointError(f"checkpoint header: step={step!r} must be an integer, 0 or more")
    try:
        plain = json.loads(_dump(dict(header)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint header is not JSON: {error}") from error
    return {"schema_version": SCHEMA_VERSION, **plain}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked: form, checksum, sizes, names, and that each tensor's
    boxes tile it.

    Raises CheckpointError that names the folder and what is wrong.
    """
    path = folder / MANIFEST
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path}: {size} bytes is too large for a manifest (at most {MAX_BYTES})")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint: {MANIFEST} cannot be read ({error.strerror or error})"
        ) from error
    try:
        return decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def decode(data: bytes) -> Manifest:
    """The manifest in these bytes; raises CheckpointError saying what is wrong with them."""
    first = _FIRST_LINE.match(data)
    intact = first is not None and digest(memoryview(data)[first.end() :]) == first[1].decode()
    damage = "the manifest does not match its own checksum: it was damaged or edited after it was written"
    try:
        manifest = _manifest(parse_json(data))
    except CheckpointError as error:
        # Say what the reader stumbled over, and, where it is so, that the file is not what was written.
        raise error if intact else CheckpointError(f"{error} ({damage})") from error
    if not intact:
        raise CheckpointError(damage)
    return manifest


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object, strictly: no NaN, no key twice. Raises CheckpointError."""

    def refuse_constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is not JSON")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"key {key!r} stands twice")
            result[key] = value
        return result

    try:
        parsed = json.loads(data.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {error}") from error
    return _typed(parsed, dict, "the object")


def _manifest(parsed: dict[str, Any]) -> Manifest:
    version = parsed.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise CheckpointError(
            f"schema_version {version!r} is not known; this version of ultrascale reads {SCHEMA_VERSION}"
        )
    header = {key: value for key, value in parsed.items() if key not in OWN_KEYS}
    encode_header(header)
    _typed(header["config"], dict, "config")
    files = {}
    for name, entry in _typed(parsed.get("files"), dict, "files").items():
        _file_name(name)
        _keys(entry, ("bytes", "header"), f"file {name}")
        files[name] = FileEntry(
            _size(entry["bytes"], f"file {name}: bytes"), _checksum(entry["header"], f"file {name}")
        )
    tensors = {name: _tensor(name, entry) for name, entry in _typed(parsed.get("tensors"), dict, "tensors").items()}
    check(tensors, files)
    return Manifest(header, tensors, files)


def _tensor(name: str, entry: Any) -> TensorEntry:
    what = f"tensor {name}"
    _keys(entry, ("shape", "dtype", "shards"), what)
    shards = []
    for i, shard in enumerate(_typed(entry["shards"], list, f"{what}: shards")):
        where = f"{what}: shard {i}"
        _keys(shard, ("file", "key", "offset", "shape", "checksum"), where)
        shards.append(
            Shard(
                file=_file_name(shard["file"], where),
                key=_typed(shard["key"], str, f"{where}: key"),
                offset=_dims(shard["offset"], f"{where}: offset"),
                shape=_dims(shard["shape"], f"{where}: shape"),
                checksum=_checksum(shard["checksum"], where),
            )
        )
    dtype = _typed(entry["dtype"], str, f"{what}: dtype")
    return TensorEntry(_dims(entry["shape"], f"{what}: shape"), dtype, tuple(shards))


def check(tensors: Mapping[str, TensorEntry], files: Mapping[str, FileEntry]) -> None:
    """Raises CheckpointError naming every tensor whose boxes do not hold each of its elements exactly once,
    and every file or key that does not fit."""
    problems: list[str] = []
    stored: set[tuple[str, str]] = set()
    for name, entry in tensors.items():
        problems += _tensor_problems(name, entry)
        for shard in entry.shards:
            if shard.file not in files:
                problems.append(f"tensor {name}: file {shard.file} is not in the list of files")
            if (shard.file, shard.key) in stored:
                problems.append(f"tensor {name}: key {shard.key!r} of {shard.file} is used by more than one shard")
            stored.add((shard.file, shard.key))
    used = {file for file, _ in stored}
    problems += [f"file {file} holds no tensor" for file in files if file not in used]
    refuse(problems)


def _tensor_problems(name: str, entry: TensorEntry) -> Iterable[str]:
    if entry.dtype not in DTYPES:
        yield f"tensor {name}: dtype {entry.dtype!r} is not one of {', '.join(DTYPES)}"
        return
    if len(entry.shape) > MAX_DIMS or 0 in entry.shape or elements(entry.shape) > MAX_ELEMENTS:
        yield (
            f"tensor {name}: shape {list(entry.shape)} is not that of a stored tensor: "
            f"at most {MAX_DIMS} dims, none of size 0"
        )
        return
    for shard in entry.shards:
        if 0 in shard.shape or not inside(shard.offset, shard.shape, entry.shape):
            yield (
                f"tensor {name}: the shard at {list(shard.offset)} of shape {list(shard.shape)} in "
                f"{shard.file} does not lie "
                f"inside the shape {list(entry.shape)}"
            )
            return
    wrong = untiled(entry.shape, [(s.offset, s.shape) for s in entry.shards])
    if wrong is not None:
        holders = ", ".join(f"{entry.shards[i].file}:{entry.shards[i].key}" for i in wrong.boxes)
        how = f"by {len(wrong.boxes)} shards ({holders})" if wrong.boxes else "by no shard"
        yield f"tensor {name} of shape {list(entry.shape)}: element {list(wrong.element)} is stored {how}"


def refuse(problems: Iterable[str]) -> None:
    """Raises one CheckpointError with all the problems, if there are any."""
    problems = list(problems)
    if problems:
        raise CheckpointError("\n".join(problems))


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _typed(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"{what}: {_short(value)} is not a {kind.__name__}")
    return value


def _keys(value: Any, keys: tuple[str, ...], what: str) -> None:
    if set(_typed(value, dict, what)) != set(keys):
        raise CheckpointError(f"{what}: keys {_short(sorted(value))} must be {list(keys)}")


def _size(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_ELEMENTS:
        raise CheckpointError(f"{what}: {_short(value)} is not a size")
    return value


def _dims(value: Any, what: str) -> Dims:
    return tuple(_size(n, what) for n in _typed(value, list, what))


def _checksum(value: Any, what: str) -> str:
    if type(value) is not str or not _CHECKSUM.fullmatch(value):
        raise CheckpointError(f"{what}: checksum {_short(value)} is not of the form sha256:<64 hex digits>")
    return value


def _file_name(value: Any, what: str = "files") -> str:
    if type(value) is not str or not _FILE.fullmatch(value):
        raise CheckpointError(
            f"{what}: file name {_short(value)} is refused: a plain name ending in .safetensors inside the "
            "folder is wanted"
        )
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
