"""First weights from a Hugging Face folder or a checkpoint: each rank reads the bytes of its own boxes, and no more.

What `init.rules` leave fresh is what the run's own seed has drawn: nothing is written there, so that it is the same
under every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ultrascale.checkpoint.boxes import Box, CheckpointError, pieces, slices
from ultrascale.checkpoint.hugging_face import open_folder
from ultrascale.checkpoint.manifest import read_manifest
from ultrascale.checkpoint.read import Verify, as_tensor, load
from ultrascale.checkpoint.stored import Places, Reader
from ultrascale.checkpoint.values import convert, exact
from ultrascale.checkpoint.weight_rules import Applied, Origins, Shapes, origins
from ultrascale.checkpoint.write import DTYPE_NAMES
from ultrascale.config.schema import Init, WeightRule

BLOCK = 1 << 22
"""Elements that are read at a time."""


def has_source(init: Init) -> bool:
    """Whether the first weights are read from somewhere."""
    return init.from_hf is not None or init.from_checkpoint is not None


@dataclass(frozen=True)
class FirstWeights:
    """What was done."""

    path: str
    applied: tuple[Applied, ...]


@torch.no_grad()
def fill_from_hf(
    path: Path, wanted: Sequence[Box], shapes: Shapes, rules: Sequence[WeightRule] = (), compare_copies: bool = True
) -> FirstWeights:
    """Fills the boxes of masters, in place. Not collective.

    shapes           all parameters of the whole job
    compare_copies   whether this rank reads both of a tied tensor that is there twice

    Raises CheckpointError with everything that does not fit.
    """
    folder = open_folder(path, compare_copies)
    there = {name: tensor.shape for name, tensor in folder.stored.items()}
    found = origins(str(path), rules, shapes, there)
    boxes = renamed(wanted, found, there)
    places = {name: Places(folder.stored[name]) for name in {box.name for box in boxes}}
    _refuse_narrow(path, boxes, {name: tensor.dtype for name, tensor in folder.stored.items()})
    with Reader() as reader:
        for box in boxes:
            dtype, as_stored = DTYPE_NAMES[box.tensor.dtype], folder.stored[box.name].dtype
            for offset, shape in pieces(box.offset, tuple(box.tensor.shape), BLOCK):
                tensor = places[box.name].touching(offset, shape)
                bits = np.ascontiguousarray(convert(reader.box(tensor, offset, shape).reshape(-1), as_stored, dtype))
                values = as_tensor(bits, box.tensor.dtype).reshape(shape)
                box.tensor[slices(offset, shape, box.offset)].copy_(values)
    return FirstWeights(str(path), found.applied)


def fill_from_checkpoint(
    folder: Path,
    wanted: Sequence[Box],
    shapes: Shapes,
    rules: Sequence[WeightRule],
    verify: Verify,
    among: tuple[int, int],
) -> FirstWeights:
    """The same from a checkpoint of any layout; its optimizer state is not read.

    verify, among   as `read.load` has them

    Raises CheckpointError with everything that does not fit, or the file that is damaged.
    """
    manifest = read_manifest(folder)
    there = {name: entry for name, entry in manifest.tensors.items() if "/" not in name}
    sizes = {name: entry.shape for name, entry in there.items()}
    found = origins(str(folder), rules, shapes, sizes)
    boxes = renamed(wanted, found, sizes)
    _refuse_narrow(folder, boxes, {name: entry.dtype for name, entry in there.items()})
    read = {origin.name for origin in found.of.values()}
    of_job = replace(manifest, tensors={name: entry for name, entry in there.items() if name in read})
    load(folder, boxes, verify, manifest=of_job, widen=True, among=among)
    return FirstWeights(str(folder), found.applied)


def renamed(wanted: Iterable[Box], found: Origins, there: Shapes) -> list[Box]:
    """The parts of the wanted boxes that are read, as boxes of the source's tensors."""
    boxes = []
    for box in wanted:
        origin = found.of[box.name]
        if origin.name is None:
            continue
        tensor = box.tensor.detach()
        if origin.rows is not None:
            tensor = tensor.narrow(0, 0, max(0, min(tensor.shape[0], origin.rows - box.offset[0])))
        if tensor.numel():
            boxes.append(Box(origin.name, there[origin.name], box.offset, tensor))
    return boxes


def _refuse_narrow(where: Path, boxes: Iterable[Box], dtypes: dict[str, str]) -> None:
    """Masters must hold every value that is there."""
    for box in boxes:
        there, here = dtypes[box.name], DTYPE_NAMES[box.tensor.dtype]
        if not exact(there, here):
            raise CheckpointError(
                f"{where}: {box.name} is {there} there and masters are {here} here, which cannot hold it; "
                f"use precision.compute={there}, or convert the folder"
            )
