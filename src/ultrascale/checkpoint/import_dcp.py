"""Pickled metadata of PyTorch checkpoints, unpickled without being run. Needs no torch.

A pickle is a program: loading it imports what it names, calls what it imports, and sets attributes of what that
returns. Here its instructions are taken apart (pickletools parses, and runs nothing) and followed on a stack of plain
values, of which the three dangerous ones do less: a name that is not on a list is an error, and one that is is never
imported; a call is kept as a `Record` of what would be called; state is put beside the record, not into an object.
So nothing that a file holds can run code, whatever it holds, and this is the only place that reads pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from io import BytesIO
from pickletools import genops
from typing import Any, NoReturn

from ultrascale.checkpoint.boxes import CheckpointError

Name = tuple[str, str]
"""(module, name)."""

_DCP = "torch.distributed.checkpoint"
_DTYPES = (
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip
_STORAGES = ("Double", "Float", "BFloat16", "Half", "Long", "Int", "Short", "Char", "Byte", "Bool")

METADATA: frozenset[Name] = frozenset(
    {
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        # What torch before 2.3 wrote.
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        # Plans of the ranks that saved, which Megatron keeps beside the tensors; they are not looked at.
        (f"{_DCP}.planner", "SavePlan"),
        (f"{_DCP}.planner", "WriteItem"),
        (f"{_DCP}.planner", "WriteItemType"),
        (f"{_DCP}.planner", "TensorWriteData"),
        (f"{_DCP}.planner", "BytesIOWriteData"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
        ("megatron.core.dist_checkpointing.strategies.resharding", "TensorReformulationMetadata"),
        ("torch", "Size"),
        *(("torch", name) for name in _DTYPES),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)
"""Names that the `.metadata` file of a checkpoint may hold."""

TENSOR: frozenset[Name] = frozenset(
    {
        ("torch._utils", "_rebuild_tensor_v2"),
        *(("torch", f"{kind}Storage") for kind in _STORAGES),
        ("collections", "OrderedDict"),
    }
)
"""Names that the description of one stored tensor may hold."""


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that a pickle names; it was not imported."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Record:
    """A call that was not made, or an object that was not built.

    kind    what would be called
    state   what the object would be given: a mapping of its attributes, as a rule
    """

    kind: Named
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, slots=True)
class Reference:
    """What a pickle says of something that lies outside of it: of a tensor's storage."""

    content: Any


def unpickled(data: bytes, allowed: Collection[Name], what: str) -> Any:
    """The value that a pickle describes: numbers, texts, tuples, lists, dicts, and records of everything else.

    allowed   names that it may hold; it is refused by the first other one
    what      where it comes from, for messages

    Raises CheckpointError for anything that is not such a pickle, and has run nothing then either.
    """
    machine = _Machine(allowed, what)
    try:
        for opcode, argument, _ in genops(BytesIO(data)):
            if opcode.name == "STOP":
                return machine.result()
            step = _STEPS.get(opcode.name)
            if step is None:
                machine.refuse(f"the instruction {opcode.name} is not one that such a file needs")
            step(machine, argument)
        machine.refuse("it has no end: truncated, or damaged")
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"{what}: damaged, or no pickle ({type(error).__name__}: {str(error)[:120]})") from error


class _Machine:
    """A pickle's stack, its marks and its memo."""

    def __init__(self, allowed: Collection[Name], what: str) -> None:
        self.allowed, self.what = allowed, what
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.what}: {why}; nothing of it was run, and nothing was imported")

    def result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            self.refuse(f"it leaves {len(self.stack)} values where one is wanted")
        return self.stack[0]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            self.refuse("it takes more values than it has")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        """The last value, which must be of this very kind: what is filled is never something that was named."""
        value = self.stack[-1]
        if type(value) is not kind:
            self.refuse(f"it fills a {type(value).__name__} as if it were a {kind.__name__}")
        return value

    def marked(self) -> list[Any]:
        """All values since the last mark, which goes with them."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def named(self, module: Any, name: Any) -> None:
        """Pushes a name, if it is on the list word for word: `a.b` is not `b` in `a`."""
        if type(module) is not str or type(name) is not str or (module, name) not in self.allowed:
            said = f"{module}.{name}" if type(module) is type(name) is str else "something that is no text"
            self.refuse(f"it names {said[:200]!r}, which is not on the list of what such a file may hold")
        self.push(Named(module, name))

    def called(self) -> None:
        """A call, as a record of it; the two whose result is a plain value, as that."""
        arguments, kind = self.pop(), self.pop()
        if type(kind) is not Named or type(arguments) is not tuple:
            self.refuse(f"it calls a {type(kind).__name__}")
        if kind == _ORDERED_DICT and not arguments:
            self.push({})
        elif kind == _SIZE and len(arguments) == 1 and type(arguments[0]) in (tuple, list):
            self.push(tuple(arguments[0]))
        else:
            self.push(Record(kind, arguments))

    def built(self) -> None:
        state = self.pop()
        record = self.top(Record)
        if record.state is not None:
            self.refuse("it gives an object its state twice")
        record.state = state

    def put_items(self, pairs: list[Any]) -> None:
        mapping = self.top(dict)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # A tuple's hash takes as long as whoever wrote it wants it to.
            if type(key) not in (str, int, bool, type(None), Record, Named):
                self.refuse(f"it has a {type(key).__name__} as a key")
            mapping[key] = value


_ORDERED_DICT, _SIZE = Named("collections", "OrderedDict"), Named("torch", "Size")

Step = Callable[[_Machine, Any], None]


def _push(machine: _Machine, argument: Any) -> None:
    machine.push(argument)


def _fixed(make: Callable[[], Any]) -> Step:
    return lambda machine, _: machine.push(make())


def _tuple_of(count: int) -> Step:
    def step(machine: _Machine, _: Any) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.push(tuple(reversed(values)))

    return step


def _get(machine: _Machine, number: int) -> None:
    machine.push(machine.memo[number])


def _put(machine: _Machine, number: int) -> None:
    machine.memo[number] = machine.stack[-1]


def _memoize(machine: _Machine, _: Any) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _stack_named(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(), machine.pop()
    machine.named(module, name)


def _item(machine: _Machine, _: Any) -> None:
    value, key = machine.pop(), machine.pop()
    machine.put_items([key, value])


def _append(machine: _Machine, _: Any) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def _extend(machine: _Machine, _: Any) -> None:
    values = machine.marked()
    machine.top(list).extend(values)


_STEPS: dict[str, Step] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _push),
    "NONE": _fixed(lambda: None),
    "NEWTRUE": _fixed(lambda: True),
    "NEWFALSE": _fixed(lambda: False),
    "EMPTY_TUPLE": _fixed(tuple),
    "EMPTY_LIST": _fixed(list),
    "EMPTY_DICT": _fixed(dict),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.marked())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _append,
    "APPENDS": _extend,
    "SETITEM": _item,
    "SETITEMS": lambda machine, _: machine.put_items(machine.marked()),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    "MEMOIZE": _memoize,
    "GLOBAL": lambda machine, both: machine.named(*both.split(" ", 1)),
    "STACK_GLOBAL": _stack_named,
    "REDUCE": lambda machine, _: machine.called(),
    "NEWOBJ": lambda machine, _: machine.called(),
    "BUILD": lambda machine, _: machine.built(),
    "BINPERSID": lambda machine, _: machine.push(Reference(machine.pop())),
}
"""Instruction → what is done. All that make an object in another way (INST, OBJ, EXT1, NEXT_BUFFER, …) are left out."""
