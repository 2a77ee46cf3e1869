"""A folder that torch.distributed.checkpoint (DCP) wrote, as stored tensors under its own names. Needs no torch.

    .metadata        pickled: for every name its shape, dtype and chunks; for every chunk a file, an offset, a length
    __R_N.distcp     one torch.save archive (a zip file) for each chunk, one after the other

TorchTitan saves so, and Megatron-Core in its format torch_dist, which has common.pt and metadata.json beside. Nothing
is believed: chunks must tile their tensors, archives lie in their files, and values in their archives; else an error
names what does not.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

from ultrascale.checkpoint.boxes import MAX_DIMS, CheckpointError, Dims, elements, inside, untiled
from ultrascale.checkpoint.import_dcp import METADATA, TENSOR, Named, Record, Reference, unpickled
from ultrascale.checkpoint.manifest import DTYPES, MAX_BYTES, MAX_ELEMENTS
from ultrascale.checkpoint.safetensors_file import width
from ultrascale.checkpoint.stored import Place, Reader, StoredTensor
from ultrascale.checkpoint.workers import Workers

INDEX = ".metadata"
DESCRIPTION_BYTES = 1 << 20
"""Of the pickle that describes one chunk; a real one has some 200."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "BFloat16Storage": "bfloat16", "HalfStorage": "float16",
    "LongStorage": "int64", "IntStorage": "int32", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
_READ_BYTES = 1 << 20
_LOCAL_HEADER = 30


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the archive that holds it: `length` bytes from byte `start` of a file."""

    offset: Dims
    shape: Dims
    file: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as `.metadata` describes it; `dtype` is torch's name."""

    shape: Dims
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DcpFolder:
    """What `.metadata` says.

    tensors   their name → tensor
    objects   names of what is no tensor: it stays pickled
    """

    path: Path
    tensors: Mapping[str, Described]
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of one chunk's values, and the CRC-32 that its archive gives for them."""

    name: str
    file: Path
    start: int
    length: int
    crc: int


# ---- .metadata ------------------------------------------------------------------------------------------------------


def open_dcp(path: Path) -> DcpFolder:
    """The folder's index, checked; no chunk is opened yet.

    Raises CheckpointError when there is no such folder, its metadata hold what they may not, or chunks are missing,
    overlap, or lie outside of the folder or of their file.
    """
    index = path / INDEX
    try:
        size = index.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{index}: {size} bytes are more than the metadata of a checkpoint")
        data = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{index}: the file cannot be read: {error.strerror or error}") from error
    found = _attributes(unpickled(data, METADATA, str(index)), ("Metadata", "MCoreMetadata"), str(index))
    places = _storage(index, found)
    tensors, objects = {}, []
    sizes: dict[Path, int] = {}
    for name, entry in _mapping(found, "state_dict_metadata", index).items():
        if type(name) is not str or type(entry) is not Record:
            raise CheckpointError(f"{index}: an entry of state_dict_metadata is malformed")
        if entry.kind.name == "BytesStorageMetadata":
            objects.append(name)
        else:
            tensors[name] = _described(path, name, entry, places, sizes)
    return DcpFolder(path, tensors, tuple(objects))


def _storage(index: Path, found: Mapping[str, Any]) -> dict[tuple[str, Dims | None], Mapping[str, Any]]:
    """(name, offset of the chunk) → where it is stored."""
    places: dict[tuple[str, Dims | None], Mapping[str, Any]] = {}
    for key, value in _mapping(found, "storage_data", index).items():
        what = f"{index}: storage_data"
        chunk = _attributes(key, ("MetadataIndex",), what)
        name, offset = chunk.get("fqn"), chunk.get("offset")
        if type(name) is not str:
            raise CheckpointError(f"{what}: a chunk has no name")
        where = (name, None if offset is None else _dims(offset, what))
        if where in places:
            raise CheckpointError(f"{index}: the chunk of {where[0]} at {where[1]} is stored twice")
        places[where] = _attributes(value, ("_StorageInfo",), what)
    return places


def _described(
    path: Path,
    name: str,
    entry: Record,
    places: Mapping[tuple[str, Dims | None], Mapping[str, Any]],
    sizes: dict[Path, int],
) -> Described:
    what = f"{path / INDEX}: {name}"
    tensor = _attributes(entry, ("TensorStorageMetadata",), what)
    shape = _dims(tensor.get("size"), f"{what}: size")
    properties = tensor.get("properties")
    state = properties.state if type(properties) is Record else None
    dtype = state[0] if type(state) is tuple and state else None
    if type(dtype) is not Named or dtype.module != "torch":
        raise CheckpointError(f"{what}: it has no dtype")
    if len(shape) > MAX_DIMS or elements(shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{what}: shape {list(shape)} is not that of a stored tensor: at most {MAX_DIMS} dims")
    boxes = []
    for chunk in _list(tensor.get("chunks"), f"{what}: chunks"):
        box = _attributes(chunk, ("ChunkStorageMetadata",), what)
        offset, size = _dims(box.get("offsets"), what), _dims(box.get("sizes"), what)
        if not inside(offset, size, shape):
            raise CheckpointError(
                f"{what}: the chunk at {list(offset)} of shape {list(size)} does not lie inside the shape {list(shape)}"
            )
        if 0 not in size:
            boxes.append((offset, size))
    wrong = None if 0 in shape else untiled(shape, boxes)
    if wrong is not None:
        how = f"in {len(wrong.boxes)} chunks" if wrong.boxes else "in no chunk"
        raise CheckpointError(f"{what} of shape {list(shape)}: element {list(wrong.element)} is {how}")
    return Described(shape, dtype.name, tuple(_chunk(path, name, *box, places, sizes) for box in boxes))


def _chunk(
    path: Path,
    name: str,
    offset: Dims,
    shape: Dims,
    places: Mapping[tuple[str, Dims | None], Mapping[str, Any]],
    sizes: dict[Path, int],
) -> Chunk:
    what = f"{path / INDEX}: {name}: the chunk at {list(offset)}"
    place = places.get((name, offset))
    if place is None:
        raise CheckpointError(f"{what} is stored nowhere")
    if place.get("transform_descriptors"):
        raise CheckpointError(f"{what} is compressed or otherwise transformed; save the checkpoint without extensions")
    file, start, length = place.get("relative_path"), place.get("offset"), place.get("length")
    if type(file) is not str or not _FILE.fullmatch(file):
        raise CheckpointError(f"{what}: file name {str(file)[:80]!r} is refused: a plain name in the folder is wanted")
    found = path / file
    if found not in sizes:
        if not found.is_file():
            raise CheckpointError(f"{found}: the file is missing; it holds {name}")
        sizes[found] = found.stat().st_size
    if type(start) is not int or type(length) is not int or start < 0 or length <= 0:
        raise CheckpointError(f"{what}: offset and length are no numbers of bytes")
    if start + length > sizes[found]:
        raise CheckpointError(
            f"{found}: {sizes[found]} bytes; {name} reaches to byte {start + length}: it was truncated, or is another"
        )
    return Chunk(offset, shape, found, start, length)


def _attributes(value: Any, kinds: Collection[str], what: str) -> Mapping[str, Any]:
    if type(value) is not Record or value.kind.name not in kinds or type(value.state) is not dict:
        raise CheckpointError(f"{what}: a {' or '.join(kinds)} is wanted, and something else is there")
    return value.state


def _mapping(found: Mapping[str, Any], key: str, index: Path) -> Mapping[Any, Any]:
    value = found.get(key)
    if type(value) is not dict:
        raise CheckpointError(f"{index}: {key} is no mapping")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise CheckpointError(f"{what}: a list is wanted")
    return value


def _dims(value: Any, what: str) -> Dims:
    if type(value) not in (tuple, list) or not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value):
        raise CheckpointError(f"{what}: a tuple of sizes is wanted")
    return tuple(value)


# ---- archives -------------------------------------------------------------------------------------------------------


def stored(name: str, tensor: Described) -> tuple[StoredTensor, list[Payload]]:
    """The tensor with the places of its chunks' values, and what a check of these reads.

    Raises CheckpointError when a chunk's archive is not one, or holds another tensor than `.metadata` says.
    """
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, which is none of {', '.join(DTYPES)}")
    places, payloads = [], []
    for chunk in tensor.chunks:
        payload, skipped = _payload(name, tensor.dtype, chunk)
        payloads.append(payload)
        places.append(Place(chunk.file, name, payload.start + skipped, chunk.offset, chunk.shape, None))
    return StoredTensor(tensor.shape, tensor.dtype, tuple(places)), payloads


def _payload(name: str, dtype: str, chunk: Chunk) -> tuple[Payload, int]:
    """Where the values of a chunk's storage lie, and the byte of it where the chunk's own begin."""
    what = f"{chunk.file}: the archive of {name} at byte {chunk.start}"
    with Reader() as reader:
        window = _Window(reader, chunk)
        try:
            with zipfile.ZipFile(window) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
                root = _only(name for name in entries if name.endswith("/data.pkl")).removesuffix("data.pkl")
                values = entries[f"{root}data/0"]
                description = _small(archive, entries[f"{root}data.pkl"])
                # Older torch did not write it, and ran on nothing else.
                order = entries.get(f"{root}byteorder")
                little = order is None or _small(archive, order) == b"little"
            header = window.at(values.header_offset, _LOCAL_HEADER)
            if header[:4] != b"PK\x03\x04" or not little or values.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its values do not lie where it says, or not as little-endian numbers")
            names = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
            start = values.header_offset + _LOCAL_HEADER + names
            if start + values.file_size > chunk.length:
                raise ValueError("its values reach beyond its end")
        except (zipfile.BadZipFile, struct.error, RuntimeError, EOFError, LookupError, ValueError) as error:
            raise CheckpointError(f"{what} is damaged, or none: {str(error)[:200]}") from error
    skipped = _skipped(what, dtype, chunk, unpickled(description, TENSOR, what), values.file_size)
    return Payload(name, chunk.file, chunk.start + start, values.file_size, values.CRC), skipped


def _skipped(what: str, dtype: str, chunk: Chunk, found: Any, storage_bytes: int) -> int:
    """The byte of the storage where the tensor begins, which must be the one that `.metadata` describes, row-major."""
    plain = type(found) is Record and found.kind == Named("torch._utils", "_rebuild_tensor_v2")
    storage, offset, shape, strides = found.arguments[:4] if plain and len(found.arguments) >= 4 else (None,) * 4
    content = storage.content if type(storage) is Reference else None
    word, kind, _, _, count = content if type(content) is tuple and len(content) == 5 else (None,) * 5
    found_dtype = _STORAGES.get(kind.name) if type(kind) is Named else None
    if word != "storage" or found_dtype is None or type(offset) is not int or type(count) is not int:
        raise CheckpointError(f"{what} does not describe a plain tensor")
    shape, strides = _dims(shape, what), _dims(strides, what)
    if len(strides) != len(shape):
        raise CheckpointError(f"{what} does not describe a plain tensor")
    size = width(found_dtype)
    if (found_dtype, shape) != (dtype, chunk.shape):
        raise CheckpointError(
            f"{what} holds {found_dtype} {list(shape)}, and {INDEX} says {dtype} {list(chunk.shape)}: one of the two "
            "is of another checkpoint"
        )
    dense = [elements(shape[d + 1 :]) for d in range(len(shape))]
    if any(n > 1 and stride != wanted for n, stride, wanted in zip(shape, strides, dense, strict=True)):
        raise CheckpointError(
            f"{what} is not row-major (strides {list(strides)} of shape {list(shape)}); save it after .contiguous()"
        )
    if offset < 0 or offset + elements(shape) > count or count * size != storage_bytes:
        raise CheckpointError(f"{what}: {storage_bytes} bytes do not hold {found_dtype} {list(shape)} from {offset} on")
    return offset * size


def _small(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > DESCRIPTION_BYTES or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"its entry {entry.filename} is not as torch.save writes it")
    return archive.read(entry)


def _only(names: Iterable[str]) -> str:
    found = list(names)
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} entries data.pkl")
    return found[0]


class _Window(RawIOBase):
    """A chunk's archive as a file of its own; zipfile reads its directory and what is asked for, and no more."""

    def __init__(self, reader: Reader, chunk: Chunk) -> None:
        self._reader, self._length, self._position = reader, chunk.length, 0
        self._place = Place(chunk.file, "", chunk.start, (), (), None)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        begin = (0, self._position, self._length)[whence]
        if begin + offset < 0:
            raise ValueError("it points before its beginning")
        self._position = begin + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._length - self._position)
        size = rest if size is None or size < 0 else min(size, rest)
        data = self.at(self._position, size)
        self._position += size
        return data

    def at(self, start: int, size: int) -> bytes:
        """Bytes from byte `start` of the archive; ValueError where it has not as many."""
        if start < 0 or start + size > self._length:
            raise ValueError("it points beyond its end")
        return self._reader.bytes(self._place, start, size).tobytes()


# ---- values ---------------------------------------------------------------------------------------------------------


def verify(payloads: list[Payload], workers: Workers, advance: Callable[[int], None]) -> None:
    """Reads all values once and compares them with the sums of their archives; DCP itself never looks at these.

    Raises CheckpointError naming the tensors whose values are not those that were written.
    """
    damaged = []
    for number, crc in workers.run(_crc, [(payload,) for payload in payloads]):
        payload = payloads[number]
        if crc != payload.crc:
            damaged.append(f"{payload.file}: the checksum of {payload.name} does not match: damaged")
        advance(payload.length)
    if damaged:
        raise CheckpointError(
            "\n".join(sorted(damaged))
            + "\n(archives that were written under torch.serialization.set_crc32_options(False) have no checksums: "
            "--verify off reads them)"
        )


def _crc(payload: Payload) -> int:
    place, crc = Place(payload.file, payload.name, payload.start, (), (), None), 0
    with Reader() as reader:
        for start in range(0, payload.length, _READ_BYTES):
            block = reader.bytes(place, start, min(_READ_BYTES, payload.length - start))
            crc = zlib.crc32(block.data, crc)
    return crc
