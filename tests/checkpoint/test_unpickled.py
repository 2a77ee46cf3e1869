"""Pickles of others are read without being run: whatever they hold, nothing is imported and nothing is called."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import pickle
import pickletools
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_side import write

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.dcp_folder import open_dcp, stored
from ultrascale.checkpoint.import_dcp import METADATA, TENSOR, Named, Record, unpickled
from ultrascale.checkpoint.stored import Reader

METADATA_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


class Ran:
    """The side effect that hostile pickles below want: a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(self) -> str:
        return f"touch {self.path}"


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """Fails the test when anything ran, or was imported, called or evaluated by name."""
    calls: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            raise AssertionError(f"{name} was called")

        return call

    for module, name in (
        (os, "system"),
        (os, "popen"),
        (subprocess, "Popen"),
        (builtins, "eval"),
        (importlib, "import_module"),
        (pickle, "Unpickler"),
        (pickle, "load"),
        (pickle, "loads"),
        (torch, "load"),
    ):
        monkeypatch.setattr(module, name, noted(name))
    result = Ran(tmp_path / "ran")
    yield result
    assert not calls
    assert not result.path.exists()


def text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data


def named(module: str, name: str) -> bytes:
    """Protocol 4's way of naming, which takes dots in the name."""
    return text(module) + text(name) + b"\x93"


class Reduced:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = (function, arguments)

    def __reduce__(self) -> Any:
        return self.parts


SYSTEM = os.system
HOSTILE: dict[str, Callable[[str], bytes]] = {
    "os.system by REDUCE": lambda c: pickle.dumps(Reduced(SYSTEM, c)),
    "os.system, protocol 0": lambda c: f"cos\nsystem\n(S'{c}'\ntR.".encode(),
    "posix.system": lambda c: f"cposix\nsystem\n(S'{c}'\ntR.".encode(),
    "builtins.eval": lambda c: (
        b"\x80\x04" + named("builtins", "eval") + text(f"__import__('os').system('{c}')") + b"\x85R."
    ),
    "builtins.getattr": lambda c: b"\x80\x02cbuiltins\ngetattr\n" + METADATA_CLASS + b"X\x08\x00\x00\x00__init__\x86R.",
    "__builtin__.getattr": lambda c: b"\x80\x02c__builtin__\ngetattr\n.",
    "a dotted name": lambda c: b"\x80\x04" + named("torch", "serialization.os.system") + text(c) + b"\x85R.",
    "a dotted name of a listed class": lambda c: (
        b"\x80\x04" + named("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__") + b"."
    ),
    "a dotted name, GLOBAL": lambda c: b"\x80\x04ctorch\nSize.__class__.__base__\n.",
    "a dotted module": lambda c: b"\x80\x04" + named("torch.serialization.os", "system") + text(c) + b"\x85R.",
    "torch.load": lambda c: b"\x80\x04" + named("torch", "load") + text(c) + b"\x85R.",
    "torch.hub": lambda c: b"\x80\x04" + named("torch.hub", "load") + text(c) + b"\x85R.",
    "an attribute of _get_layout": lambda c: b"\x80\x04" + named("torch.serialization", "_get_layout.__call__") + b".",
    "a name that is a number": lambda c: b"\x80\x04K\x01K\x02\x93.",
    "a module that is no text": lambda c: b"\x80\x04}" + text("system") + b"\x93.",
    "BUILD on a class": lambda c: b"\x80\x02" + METADATA_CLASS + b"}X\x08\x00\x00\x00__init__K\x01sb.",
    "BUILD on a mapping": lambda c: b"\x80\x02}}X\x01\x00\x00\x00aK\x01sb.",
    "BUILD twice": lambda c: b"\x80\x02" + METADATA_CLASS + b")\x81}b}b.",
    "a call of a result": lambda c: b"\x80\x02" + METADATA_CLASS + b")\x81)R.",
    "a call of a text": lambda c: b"\x80\x04" + text("os.system") + text(c) + b"\x85R.",
    "a new object of a result": lambda c: b"\x80\x02" + METADATA_CLASS + b")\x81)\x81.",
    "INST": lambda c: f"(S'{c}'\nios\nsystem\n.".encode(),
    "OBJ": lambda c: b"(" + METADATA_CLASS + f"S'{c}'\no.".encode(),
    "NEWOBJ_EX": lambda c: b"\x80\x04" + METADATA_CLASS + b")}\x92.",
    "an extension code": lambda c: b"\x80\x02\x82\x01.",
    "DUP": lambda c: b"\x80\x02]0]2.",
    "items put into an object": lambda c: b"\x80\x02" + METADATA_CLASS + b")\x81K\x01K\x02s.",
    "values appended to an object": lambda c: b"\x80\x02" + METADATA_CLASS + b")\x81K\x01a.",
    "an empty stack": lambda c: b"\x80\x02R.",
    "two values": lambda c: b"\x80\x02K\x01K\x02.",
    "an open mark": lambda c: b"\x80\x02(K\x01.",
    "values from before a mark": lambda c: b"\x80\x02K\x01(\x85.",
    "a memo that was never filled": lambda c: b"\x80\x02h\x07.",
    "a memo as large as memory": lambda c: b"\x80\x02K\x01r\xff\xff\xff\xffq\x00h\x01.",
    "a text longer than the file": lambda c: b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.",
    "a number of many digits": lambda c: b"\x80\x02\x8b" + (1 << 30).to_bytes(4, "little") + b"1.",
    "no end": lambda c: b"\x80\x02K\x01",
    "nothing": lambda c: b"",
    "no pickle": lambda c: b"PK\x03\x04 and so on",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_is_run(ran: Ran, tmp_path: Path, name: str) -> None:
    data = HOSTILE[name](ran.command())
    for allowed in (METADATA, TENSOR):
        with pytest.raises(CheckpointError, match="here"):
            unpickled(data, allowed, "here")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        open_dcp(tmp_path / "folder")


def test_a_key_whose_hash_takes_forever_is_not_hashed() -> None:
    """Each tuple holds the one before twice; this one is still quick to hash, and one of 60 levels would never be."""
    tuples = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(16))
    with pytest.raises(CheckpointError, match="has a tuple as a key"):
        unpickled(b"\x80\x02}q\xff)q\x00" + tuples + b"h\xffh\x10K\x01s.", METADATA, "here")


@pytest.mark.parametrize("name", ["os.system by REDUCE", "builtins.eval", "a dotted name"])
def test_what_a_refused_pickle_names_is_said(ran: Ran, name: str) -> None:
    wanted = {"os.system by REDUCE": "posix.system", "builtins.eval": "builtins.eval"}
    said = wanted.get(name, "torch.serialization.os.system")
    with pytest.raises(CheckpointError, match=f"names '{said}', which is not on the list.*nothing of it was run"):
        unpickled(HOSTILE[name](ran.command()), METADATA, "here")


def test_the_hostile_pickles_do_run_in_pickle(tmp_path: Path) -> None:
    """Otherwise the refusals above would show nothing."""
    for number, name in enumerate(("os.system by REDUCE", "os.system, protocol 0", "a dotted name", "INST")):
        path = tmp_path / str(number)
        pickle.loads(HOSTILE[name](f"touch {path}"))
        assert path.exists(), name


def with_archive(folder: Path, content: bytes) -> Path:
    """A folder of one tensor of three float32, whose archive is another one."""
    write({"w": torch.ones(3)}, folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.storage_meta = None
    (place,) = metadata.storage_data.values()
    (folder / place.relative_path).write_bytes(content)
    place.length = len(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    return folder


def saved(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder in whose archive another pickle describes the tensor, sums and sizes right."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.ones(3)))) as real, zipfile.ZipFile(changed, "w") as archive:
        for entry in real.infolist():
            pickled = entry.filename.endswith("/data.pkl")
            archive.writestr(entry.filename, HOSTILE_ARCHIVE if pickled else real.read(entry))
    return with_archive(tmp_path / "folder", changed.getvalue())


def test_a_tensor_that_begins_inside_its_storage_is_read_from_there(tmp_path: Path) -> None:
    folder = with_archive(tmp_path / "folder", saved(torch.arange(9.0)[4:7]))
    tensor, _ = stored("w", open_dcp(folder).tensors["w"])
    with Reader() as reader:
        assert reader.box(tensor, (0,), (3,)).view("float32").tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.ones(6)[::2], "not row-major"),
        (torch.ones(4), r"holds float32 \[4\], and \.metadata says float32 \[3\]"),
        (torch.ones(3, dtype=torch.int32), "holds int32"),
        (torch.ones(3).to_sparse(), r"torch\._utils\._rebuild_sparse_tensor.*not on the list"),
        (torch.nn.Parameter(torch.ones(3)), r"torch\._utils\._rebuild_parameter.*not on the list"),
    ],
)
def test_an_archive_of_another_tensor_is_refused(tmp_path: Path, tensor: torch.Tensor, said: str) -> None:
    folder = with_archive(tmp_path / "folder", saved(tensor))
    with pytest.raises(CheckpointError, match=said):
        stored("w", open_dcp(folder).tensors["w"])


HOSTILE_ARCHIVE = HOSTILE["posix.system"]("exit 1").replace(b"cposix", b"\x80\x02cposix")


def test_a_hostile_archive_is_refused_and_nothing_is_run(hostile: Path, ran: Ran) -> None:
    """The pickle inside the archive of one chunk, which is as much a program as the metadata."""
    described = open_dcp(hostile).tensors["w"]
    with pytest.raises(CheckpointError, match=r"archive of w at byte 0: it names 'posix\.system'"):
        stored("w", described)


def test_names_are_not_imported_and_calls_are_kept_as_records() -> None:
    data = (
        b"\x80\x02cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n)\x81}X\x01\x00\x00\x00aK\x05sb."
    )
    found = unpickled(data, METADATA, "here")
    assert type(found) is Record
    assert (found.kind.name, found.arguments, found.state) == ("MCoreMetadata", (), {"a": 5})
    assert not any(module.startswith("megatron") for module in sys.modules)


def test_what_torch_writes_is_read_as_it_is(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(5, 3), "b": torch.zeros(2, dtype=torch.bfloat16), "c": torch.tensor(3)}
    write({**tensors, "d": {"e": [1, "x"]}, "f": 0.5}, tmp_path / "folder")
    found = open_dcp(tmp_path / "folder")
    said = {name: (one.shape, one.dtype) for name, one in found.tensors.items()}
    assert said == {"a": ((5, 3), "float32"), "b": ((2,), "bfloat16"), "c": ((), "int64")}
    assert "f" in found.objects
    for name, one in found.tensors.items():
        ((place,), (payload,)) = stored(name, one)[0].places, stored(name, one)[1]
        raw = place.file.read_bytes()[place.start : place.start + payload.length]
        assert torch.equal(
            torch.frombuffer(bytearray(raw), dtype=tensors[name].dtype).view(tensors[name].shape), tensors[name]
        )
    theirs = dcp.FileSystemReader(tmp_path / "folder").read_metadata()
    assert {index.fqn for index in theirs.storage_data} == found.tensors.keys() | set(found.objects)


def test_plain_values_are_those_that_pickle_reads() -> None:
    """Every protocol from 2 on; every kind of value that may be in such a file."""
    shared = ["x", 300, -7, 1 << 40, -(1 << 70), 2.5, None, True, False, b"bytes", "ä" * 300, (), (1,), (1, 2, 3, 4)]
    value = {"a": shared, "b": (shared, shared), 3: {"c": {}}, None: [[], [[]]], "size": torch.Size([3, 4])}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert (
            unpickled(pickle.dumps(value, protocol), METADATA | {("_codecs", "encode")}, "here").keys() == value.keys()
        )
        if protocol > 2:  # protocol 2 calls a function for bytes
            assert unpickled(pickle.dumps(value, protocol), METADATA, "here") == value


def test_any_change_of_bytes_is_an_error_of_ours_or_a_value(tmp_path: Path) -> None:
    folder = write({"a": torch.ones(5, 3), "o": {"state": {"b": torch.ones(2)}, "lr": 0.1}}, tmp_path / "folder")
    whole = (folder / ".metadata").read_bytes()
    draw = random.Random(0)
    opcodes = [op.code.encode("latin-1") for op in pickletools.opcodes]
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            data[at : at + draw.randint(0, 2)] = draw.choice([draw.randbytes(1), draw.choice(opcodes), b""])
        try:
            unpickled(bytes(data), METADATA, "here")
        except CheckpointError:
            continue


def test_lists_of_names_hold_no_way_out() -> None:
    """No name that would do harm even if it were called, and none with a dot, which pickle follows."""
    for module, name in METADATA | TENSOR:
        assert "." not in name
        assert module.split(".")[0] in ("torch", "megatron", "collections", "pathlib")
        assert name not in ("load", "save", "exec", "eval", "getattr", "setattr", "import_module")
    assert Named("torch", "Size") == Named("torch", "Size")
