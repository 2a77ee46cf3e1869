"""Finding documents: text files, JSONL, folders of source code, cut into pieces of work of a bounded size.

How a corpus is cut depends on the corpus alone, never on how many processes work on it.
"""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ultrascale.data.errors import DataError

JSONL_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
LARGEST_DOCUMENT = 1 << 28  # bytes; tokenizers take several times that in memory
PIECE_BYTES = 1 << 20
PIECE_ITEMS = 1024
STDLIB = "builtin:stdlib"
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Item:
    """What one document is made from.

    origin  file, or file:line, for messages
    raw     its bytes, or None when the whole file `path` is the document
    json_field  the field that holds the text, when the bytes are a JSON line
    optional    a file met in a folder: left out when it is not text
    """

    origin: str
    raw: bytes | None = None
    path: Path | None = None
    json_field: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Piece:
    """A bounded amount of work: items in order, and how many bytes of the inputs they stand for."""

    items: tuple[Item, ...]
    input_bytes: int


@dataclass(frozen=True)
class InputFile:
    """A file of the corpus; `optional` as in Item."""

    path: Path
    size: int
    optional: bool


def find_files(inputs: Sequence[str | Path]) -> list[InputFile]:
    """The files of a corpus: those named, and all in the folders named, sorted by path within each folder.

    Hidden files and folders, __pycache__, node_modules and links in a folder are left out. builtin:stdlib is the
    source of this Python's standard library.
    Raises DataError for an input that is missing or a file named twice, and when nothing is found.
    """
    found: list[InputFile] = []
    for given in inputs:
        path = Path(given)
        if given == STDLIB:
            found += stdlib_files()
        elif path.is_dir():
            found += [InputFile(file, file.stat().st_size, True) for file in _walk(path)]
        elif path.is_file():
            found.append(InputFile(path, path.stat().st_size, False))
        else:
            raise DataError(f"{path}: there is no such file or folder")
    if not found:
        raise DataError(f"{', '.join(map(str, inputs)) or 'no input given'}: there are no files to read")
    seen: set[Path] = set()
    for file in found:
        resolved = file.path.resolve()
        if resolved in seen:
            raise DataError(f"{file.path}: is named twice; its documents would count double")
        seen.add(resolved)
    return found


def stdlib_files() -> list[InputFile]:
    """The .py files of this Python's standard library, sorted by path. Raises DataError when it has none."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _NOT_STDLIB)
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file() and not path.is_symlink():
                found.append(InputFile(path, path.stat().st_size, optional=True))
    if not found:
        raise DataError(f"{root}: this Python has no standard library in source, so there is no {STDLIB}; use a prefix")
    return sorted(found, key=lambda file: file.path.relative_to(root).as_posix())


def pieces(files: Sequence[InputFile], text_field: str = "text", separator: str | None = None) -> Iterator[Piece]:
    """The documents of `files` in order, as pieces of about 1 MiB or 1024 items.

    JSONL (.jsonl, .ndjson, also .gz) has a document a line, in `text_field`. Any other file is one document,
    or, with `separator`, what lies between separators.
    """
    items: list[Item] = []
    size = 0
    for file in files:
        for item, consumed in _items(file, text_field, separator):
            if item is not None:
                items.append(item)
            size += consumed
            if size >= PIECE_BYTES or len(items) >= PIECE_ITEMS:
                yield Piece(tuple(items), size)
                items, size = [], 0
    if items or size:
        yield Piece(tuple(items), size)


def read_text(item: Item) -> str | None:
    """The text of a document; None for an optional file that is not text. Raises DataError with file, or
    file:line.
    """
    if item.json_field is not None:
        return _json_text(item)
    raw = item.raw
    if raw is None:
        assert item.path is not None
        try:
            if item.path.stat().st_size > LARGEST_DOCUMENT:
                if item.optional:
                    return None
                raise _too_large(item.origin)
            raw = item.path.read_bytes()
        except OSError as error:
            if item.optional:
                return None
            raise DataError(f"{item.origin}: cannot be read ({error.strerror})") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if item.optional:
            return None
        raise DataError(f"{item.origin}: is not UTF-8 text (byte {error.start}); convert it first") from error
    if item.optional and "\0" in text:
        return None
    return text


def _json_text(item: Item) -> str:
    assert item.raw is not None
    assert item.json_field is not None
    try:
        content = json.loads(item.raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{item.origin}: is not a line of JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{item.origin}: is a JSON {type(content).__name__}, not an object with {item.json_field!r}")
    if item.json_field not in content:
        there = ", ".join(map(str, list(content)[:8])) or "none"
        raise DataError(
            f"{item.origin}: has no field {item.json_field!r} (fields: {there}); name it: --text-field FIELD"
        )
    text = content[item.json_field]
    if not isinstance(text, str):
        raise DataError(f"{item.origin}: field {item.json_field!r} is a {type(text).__name__}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{item.origin}: field {item.json_field!r} holds half a surrogate pair ({error.reason})"
        ) from error
    return text


def _walk(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir():
            if path.name not in _SKIPPED_FOLDERS:
                found += _walk(path)
        elif path.is_file():
            found.append(path)
    return found


def _items(file: InputFile, text_field: str, separator: str | None) -> Iterator[tuple[Item | None, int]]:
    """Items of a file, each with the bytes of the file read for it."""
    if file.path.name.endswith(JSONL_ENDINGS):
        yield from _lines(file, text_field)
    elif separator is not None and not file.optional:
        yield from _separated(file, separator)
    else:
        yield Item(str(file.path), path=file.path, optional=file.optional), file.size


def _lines(file: InputFile, text_field: str) -> Iterator[tuple[Item | None, int]]:
    before = 0
    try:
        with file.path.open("rb") as raw_file:
            compressed = file.path.name.endswith(".gz")
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw_file)) if compressed else raw_file
            number = 0
            while line := stream.readline(LARGEST_DOCUMENT + 1):
                number += 1
                origin = f"{file.path}:{number}"
                if len(line) > LARGEST_DOCUMENT:
                    raise _too_large(origin)
                # Progress is counted in bytes of the file as it lies on the disk.
                consumed = raw_file.tell() - before if compressed else len(line)
                before += consumed
                yield (Item(origin, raw=line, json_field=text_field) if line.strip() else None), consumed
    except (OSError, EOFError) as error:
        raise DataError(f"{file.path}: cannot be read ({error})") from error


def _separated(file: InputFile, separator: str) -> Iterator[tuple[Item | None, int]]:
    mark = separator.encode("utf-8")
    if not mark:
        raise DataError("--separator is empty; name the text between two documents, such as <|endoftext|>")
    number, rest = 0, b""
    try:
        with file.path.open("rb") as stream:
            while block := stream.read(PIECE_BYTES):
                # A separator may lie across two blocks: the tail of the last one is looked at again.
                *whole, rest = (rest + block).split(mark)
                for raw in whole:
                    number += 1
                    yield Item(f"{file.path} (document {number})", raw=raw), 0
                if len(rest) > LARGEST_DOCUMENT:
                    raise _too_large(f"{file.path} (document {number + 1})")
                yield None, len(block)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror})") from error
    if rest:
        yield Item(f"{file.path} (document {number + 1})", raw=rest), 0


def _too_large(origin: str) -> DataError:
    return DataError(
        f"{origin}: is one document of more than {LARGEST_DOCUMENT >> 20} MiB; cut it into documents: "
        "JSONL with a "
        "document a line, or --separator TEXT for what stands between them"
    )
