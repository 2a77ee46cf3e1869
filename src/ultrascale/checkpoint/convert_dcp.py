"""Checkpoints of TorchTitan and Megatron-Core, and other folders of torch.distributed.checkpoint, into ours: streamed,
whole or not there. Needs no torch.

Such a folder says nothing of the model but names and shapes; a config says the rest, and is that of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ultrascale.checkpoint.boxes import CheckpointError, Dims, elements, intersection, pieces
from ultrascale.checkpoint.dcp_folder import DcpFolder, Described, Payload, open_dcp, verify
from ultrascale.checkpoint.dcp_folder import stored as stored_there
from ultrascale.checkpoint.manifest import refuse
from ultrascale.checkpoint.other_formats import refuse_other_formats
from ultrascale.checkpoint.rewrite import Count, Progress, pieces_of, refuse_to_overwrite, write_checkpoint
from ultrascale.checkpoint.safetensors_file import width
from ultrascale.checkpoint.stored import Place, Reader, StoredTensor
from ultrascale.checkpoint.values import CONVERTIBLE, exact, numbers
from ultrascale.checkpoint.workers import Workers
from ultrascale.config.schema import Config
from ultrascale.models.hugging_face import HuggingFaceError
from ultrascale.models.hugging_face_families import of_model
from ultrascale.models.other_trainers import NOT_WEIGHTS, Held, Naming, Source, copies, naming

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, which have the same names everywhere."""

_CHAINED = re.compile(r"chained_\d+\.")
_ITERATION = re.compile(r"iter_(\d{7,})")
_NAMED = 12
"""Names in a message, at most."""


@dataclass(frozen=True)
class Imported:
    """What was written, and what was not.

    trainer    whose names they were
    source     the state that weights were read from, and its dtype
    moments    whether AdamW's moments came along
    left_out   what the folder holds beside, by the first word of its names
    """

    path: str
    trainer: str
    family: str
    parameters: int
    source: str
    dtype: str
    step: int
    moments: bool
    left_out: tuple[str, ...]
    bytes: int
    files: int


@dataclass(frozen=True)
class Options:
    """What a folder does not say.

    weights_only   leave moments where they are: a checkpoint of step 0
    paired         whether neighbouring features of queries and keys are turned together; None: as its trainer does it
    step           completed optimizer steps, for moments whose folder does not say
    verify         full: compare all values with the sums of their archives first
    """

    weights_only: bool = False
    paired: bool | None = None
    step: int | None = None
    verify: Literal["full", "off"] = "full"


def from_dcp(
    source: Path, target: Path, config: Config, workers: Workers, options: Options, progress: Progress | None = None
) -> Imported:
    """Writes the folder's weights as a checkpoint of the run that `config` (resolved) describes; with AdamW's moments
    and step where the folder has them all and the config can use them, otherwise of step 0.

    Raises CheckpointError when the folder is another format, holds other tensors than the model has, or is damaged, or
    when `target` is there already.
    """
    refuse_to_overwrite(target)
    refuse_other_formats(source)
    folder = open_dcp(source)
    try:
        names = naming(folder.tensors, of_model(config.model), config.model, options.paired)
    except HuggingFaceError as error:
        raise CheckpointError(f"{source}: {error}; the first names: {_listed(folder.tensors)}") from error
    theirs = _Theirs(folder, names)
    theirs.refuse_strangers()
    state = theirs.masters()
    trained = names.trained
    chosen = {name: theirs.tensor(held, state if name in trained else None) for name, held in names.held.items()}
    step = 0
    moments = [] if options.weights_only or not _wants_moments(config) else theirs.moments()
    if options.step is not None and not moments:
        raise CheckpointError(f"--step {options.step} has no effect: no moments are taken, so that the step is 0")
    for moment in moments:
        chosen |= {f"optimizer.{moment}/{name}": theirs.tensor(held, moment) for name, held in trained.items()}
    if moments:
        step = options.step if options.step is not None else theirs.step()
    dtypes = _dtypes(source, config, chosen)
    payloads = theirs.payloads if options.verify == "full" else []
    total = sum(payload.length for payload in payloads)
    boxes = [piece for name, tensor in chosen.items() for piece in pieces_of(name, tensor, dtypes[name])]
    count = Count(total + sum(piece.bytes for piece in boxes), progress)
    verify(payloads, workers, count)
    theirs.refuse_untied()
    header = _header(config, names, step, state)
    size, files = write_checkpoint(target, header, chosen, boxes, workers, count)
    weights = [tensor for name, tensor in chosen.items() if "/" not in name]
    return Imported(
        path=str(target),
        trainer=names.title,
        family=config.model.family,
        parameters=sum(elements(tensor.shape) for tensor in weights),
        source=state or "weights",
        dtype=max((t.dtype for t in weights), key=[t.dtype for t in weights].count),
        step=step,
        moments=bool(moments),
        left_out=theirs.left_out(moments),
        bytes=size,
        files=files,
    )


# ---- their tensors --------------------------------------------------------------------------------------------------


class _Theirs:
    """Their tensors by the names that they have for our parameters; which of them were read is noted."""

    def __init__(self, folder: DcpFolder, names: Naming) -> None:
        self.folder, self.names = folder, names
        self.payloads: list[Payload] = []
        self._opened: dict[str, StoredTensor] = {}
        # An optimizer in several parts has the number of the part before its names.
        self._known = {_CHAINED.sub("", name, count=1): name for name in folder.tensors}

    def tensor(self, held: Held, state: str | None) -> StoredTensor:
        """One of our parameters, or a state of it, with its places in their chunks."""
        places: list[Place] = []
        dtypes = set()
        for source in held.sources:
            there = self._open(self._name(source.theirs, state))
            dtypes.add(there.dtype)
            for place in there.places:
                places += _within(source, place, width(there.dtype))
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.folder.path}: {held.sources[0].theirs} and its like differ in dtype")
        return StoredTensor(held.shape, dtypes.pop(), tuple(places), held.rows)

    def masters(self) -> str | None:
        """The state that holds the parameters in full precision, when it holds them all."""
        trainer = self.names.trainer
        state = trainer.masters if trainer else None
        return state if state is not None and not self._problems(state) else None

    def moments(self) -> list[str]:
        """The names of AdamW's moments when all are there; raises CheckpointError when it is some of them."""
        problems = {moment: self._problems(moment) for moment in MOMENTS}
        if all(not found for found in problems.values()):
            return list(MOMENTS)
        expected = len({source.theirs for held in self.names.trained.values() for source in held.sources})
        if all(len(found) == expected and all("is missing" in one for one in found) for found in problems.values()):
            return []
        some = [line for found in problems.values() for line in found]
        raise CheckpointError(
            "\n".join(some[:_NAMED])
            + f"\n{self.folder.path} holds moments for a part of the model; --weights-only leaves them where they are"
        )

    def step(self) -> int:
        """Completed optimizer steps, as the optimizer counts them, or the trainer, or the folder's name."""
        trainer, path = self.names.trainer, self.folder.path
        states = {} if trainer is None else {self._name(source.theirs, "step"): None for source in self._sources()}
        found = {self._scalar(name) for name in states if name in self.folder.tensors}
        if not found and "train_state.step" in self.folder.tensors:
            found = {self._scalar("train_state.step")}
        if not found and (named := _ITERATION.fullmatch(path.resolve().name)):
            found = {float(named[1])}
        if len(found) != 1:
            said = f"it holds {len(found)} different numbers of steps" if found else "it does not say its step"
            raise CheckpointError(f"{path}: {said}; give --step N, or --weights-only to leave moments where they are")
        value = found.pop()
        if not 0 <= value < 2**53 or value != int(value):
            raise CheckpointError(f"{path}: its step is {value}; give --step N")
        return int(value)

    def refuse_strangers(self) -> None:
        """Raises CheckpointError with what is missing, has another shape, or is nobody's."""
        claimed = {self._name(source.theirs, None) for source in self._sources()}
        claimed |= {self._name(theirs, None) for theirs in copies(self.names)}
        strangers = [n for n in self.folder.tensors if n not in claimed and not NOT_WEIGHTS.match(n)]
        strangers = [n for n in strangers if not NOT_WEIGHTS.search(n)]
        problems = list(self._problems(None))
        problems += [f"{self.folder.path}: {name} is no tensor of this model" for name in sorted(strangers)]
        if problems:
            more = f"\n… and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            advice = self.names.trainer.advice if self.names.trainer else "save_pretrained()"
            raise CheckpointError(
                "\n".join(problems[:_NAMED])
                + more
                + f"\nNames are read as {self.names.title}'s for model.family={self.names.model.family}. If the model "
                "section of the config is that of this checkpoint, the model has more than the family has: export it "
                f"to a Hugging Face folder there, with {advice}, and run `ultrascale convert from-hf`"
            )

    def refuse_untied(self) -> None:
        """Raises CheckpointError when a head lies beside the embedding that it is tied to, and differs."""
        for theirs, ours in copies(self.names).items():
            name = self._name(theirs, None)
            if name not in self.folder.tensors:
                continue
            held = self.names.held[ours]
            source = held.sources[0]
            copy = self.tensor(Held(held.shape, (Source(theirs, source.form, *_whole(held), source.padded),)), None)
            first = self.tensor(held, None)
            with Reader() as reader:
                for offset, shape in pieces((0,) * len(held.shape), held.shape, 1 << 18):
                    same = copy.dtype == first.dtype
                    if not same or not np.array_equal(
                        reader.box(copy, offset, shape), reader.box(first, offset, shape)
                    ):
                        raise CheckpointError(
                            f"{self.folder.path}: {name} and {source.theirs} differ, and model.tie_word_embeddings is "
                            "true: set it to false"
                        )

    def left_out(self, moments: Collection[str]) -> tuple[str, ...]:
        """First words of the names of what was not read."""
        names = [*(name for name in self.folder.tensors if name not in self._opened), *self.folder.objects]
        words = {_CHAINED.sub("", name).split(".")[0].split("/")[0] for name in names if NOT_WEIGHTS.match(name)}
        if moments:
            words.discard("optimizer")
        return tuple(sorted(words))

    def _sources(self) -> Iterator[Source]:
        for held in self.names.held.values():
            yield from held.sources

    def _name(self, theirs: str, state: str | None) -> str:
        """The name in the folder."""
        full, trainer = self.names.prefix + theirs, self.names.trainer
        if state is None:
            return full
        wanted = f"optimizer.state.{full}.{state}" if trainer is None else trainer.state.format(name=full, state=state)
        return self._known.get(wanted, wanted)

    def _problems(self, state: str | None) -> list[str]:
        """What does not fit, of the tensors that hold all parameters or a state of them."""
        problems = {}
        for ours, held in (self.names.trained if state else self.names.held).items():
            for source in held.sources:
                name = self._name(source.theirs, state)
                there = self.folder.tensors.get(name)
                if there is None:
                    problems[name] = f"{self.folder.path}: {name} is missing, which holds {ours}"
                elif not _fits(source, there):
                    problems[name] = (
                        f"{self.folder.path}: {name} has shape {list(there.shape)}; the config makes it "
                        f"{list(source.form)}"
                    )
                elif there.dtype not in CONVERTIBLE:
                    problems[name] = (
                        f"{self.folder.path}: {name} has dtype {there.dtype}; {', '.join(CONVERTIBLE)} can be read"
                    )
        return list(problems.values())

    def _open(self, name: str) -> StoredTensor:
        if name not in self._opened:
            self._opened[name], payloads = stored_there(name, self.folder.tensors[name])
            self.payloads += payloads
        return self._opened[name]

    def _scalar(self, name: str) -> float:
        tensor = self._open(name)
        if elements(tensor.shape) != 1:
            raise CheckpointError(f"{self.folder.path}: {name} is no number")
        with Reader() as reader:
            bits = reader.box(tensor, (0,) * len(tensor.shape), tensor.shape)
        return float(numbers(bits.reshape(-1), tensor.dtype)[0])


def _fits(source: Source, there: Described) -> bool:
    if not source.padded:
        return there.shape == source.form
    return there.shape[1:] == source.form[1:] and len(there.shape) > 0 and there.shape[0] >= source.form[0]


def _whole(held: Held) -> tuple[Dims, Dims, Dims]:
    """Corner, offset and shape of a source that is all of a parameter."""
    start = (0,) * len(held.shape)
    return start, start, held.shape


def _within(source: Source, place: Place, size: int) -> Iterator[Place]:
    """The part of a source that lies in one chunk, as a place of our parameter."""
    dims, ours = len(source.form), len(source.shape)
    shared = min(dims, ours)
    extent = (*(1 for _ in range(dims - shared)), *source.shape[ours - shared :])
    common = intersection(source.corner, extent, place.offset, place.shape)
    if common is None:
        return
    corner, shape = common
    moved = tuple(c - s for c, s in zip(corner, source.corner, strict=True))[dims - shared :]
    offset = (*source.offset[: ours - shared], *(o + m for o, m in zip(source.offset[ours - shared :], moved)))
    # Row-major in the chunk: dims of one index, then at most one that is cut, then whole ones.
    cut = next((d for d in range(dims) if shape[d] > 1), dims)
    assert shape[cut + 1 :] == place.shape[cut + 1 :], f"{source.theirs}: a chunk cuts both rows and columns of a part"
    first = 0
    for at, begin, length in zip(corner, place.offset, place.shape, strict=True):
        first = first * length + at - begin
    box = (*(1 for _ in range(ours - shared)), *shape[dims - shared :])
    yield Place(place.file, place.key, place.start + first * size, offset, box, None)


# ---- ours -----------------------------------------------------------------------------------------------------------


def _wants_moments(config: Config) -> bool:
    """Whether every parameter has AdamW's two moments."""
    names = {config.optimizer.name, *(group.optimizer for group in config.optimizer.groups if group.optimizer)}
    return names == {"adamw"}


def _dtypes(source: Path, config: Config, chosen: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The dtype that a run under the config wants of each tensor."""
    master = "float64" if config.precision.compute == "float64" else "float32"
    refuse(
        f"{source}: {tensor.places[0].key} is {tensor.dtype} and masters are {master}, which cannot hold it; use "
        f"precision.compute={tensor.dtype}"
        for tensor in chosen.values()
        if not exact(tensor.dtype, master)
    )
    return {name: (config.optimizer.state_dtype or master) if "/" in name else master for name in chosen}


def _header(config: Config, names: Naming, step: int, state: str | None) -> dict[str, Any]:
    tied = {p.name: p.tied_to for p in names.mapping.parameters if p.tied_to and config.model.tie_word_embeddings}
    return {
        "step": step,
        "config": config.model_dump(mode="json"),
        "data_position": {},
        "axes": dict.fromkeys(config.parallel.order, 1),
        "order": list(config.parallel.order),
        "ties": {"word_embeddings": [*tied.values(), *tied]} if tied else {},
        "imported": {"from": names.title, "weights": state or "weights"},
    }


def _listed(names: Collection[str]) -> str:
    some = [name for name in names if not NOT_WEIGHTS.match(name)] or list(names)
    return ", ".join(some[:_NAMED]) + (", …" if len(some) > _NAMED else "")
